"""What the processes of all roles have in common in their settings, and how settings are read: flags, then
`TWINSTAGE_*` variables, then defaults. Each role's own are in its `config` module.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

from twinstage.addresses import split_address
from twinstage.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseSettings)

_DEFAULT = re.compile(r" \(default: (.*)\)$", re.DOTALL)
_WORDS_FOR_DEFAULTS = {"None": "", "[]": "", "{}": "", "True": "on", "False": "off"}
_ABOUT_VARIABLES = (
    "Each flag is an environment variable, too: --log-level is TWINSTAGE_LOG_LEVEL. A flag goes before its variable."
)
_WORDS_FOR_TYPES = {
    "str": "TEXT",
    "list[str]": "TEXT",
    "int": "NUMBER",
    "float": "NUMBER",
    "Path": "PATH",
    "ByteSize": "BYTES",
    "dict[str,float]": "NAME=NUMBER",
}


_WORDS_FOR_FAULTS = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "byte_size": "a number of bytes, such as 512MiB or 4GiB",
    "byte_size_unit": "a number of bytes, such as 512MiB or 4GiB",
    "literal_error": "{expected}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


class ProcessSettings(BaseSettings):
    """What every process can be told."""

    model_config = SettingsConfigDict(
        env_prefix="TWINSTAGE_",
        cli_kebab_case=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        extra="ignore",
    )

    listen: str = Field(default="0.0.0.0:0", description="host:port of the gRPC server; port 0 takes a free one.")
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file with this server's certificate chain; with it, the port speaks TLS only, and without it "
        "plain text.",
    )
    tls_key: Path | None = Field(default=None, description="PEM file with the key of --tls-certificate.")
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file with CA certificates; with it, only clients with a certificate of theirs may connect, "
        "by default all.",
    )
    drain_timeout: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )
    log_format: Literal["console", "json"] = Field(default="console", description="How log lines look.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )

    @field_validator("listen")
    @classmethod
    def _listen_has_a_port(cls, value: str) -> str:
        split_address(value)
        return value


def read_settings(kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """Read flags, then `TWINSTAGE_*` variables, then defaults. Raises ConfigError that says what is wrong."""
    try:
        source: CliSettingsSource[Settings] = CliSettingsSource(kind, formatter_class=_HelpForPeople)
        cast(argparse.ArgumentParser, source.root_parser).epilog = _ABOUT_VARIABLES
        return CliApp.run(kind, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        raise ConfigError("; ".join(_violations(error, arguments))) from error
    except SettingsError as error:
        raise ConfigError(" ".join(str(error).removeprefix("error parsing CLI: ").split())) from error


class _HelpForPeople(argparse.RawDescriptionHelpFormatter):
    """Help that says what to write instead of how Python calls it, and nothing of a default that is none."""

    def add_argument(self, action: argparse.Action) -> None:
        """As the base class."""
        in_bytes = action.metavar == "ByteSize"
        if isinstance(action.metavar, str):
            action.metavar = _WORDS_FOR_TYPES.get(action.metavar, action.metavar)
        if action.help:
            action.help = _DEFAULT.sub(lambda found: _default_in_words(found[1], in_bytes=in_bytes), action.help)
        super().add_argument(action)


def _default_in_words(value: str, *, in_bytes: bool) -> str:
    """What a person would write for a default, in parentheses; nothing for one that is none."""
    word = ByteSize(value).human_readable().replace(".0", "") if in_bytes else value.removesuffix(".0")
    word = _WORDS_FOR_DEFAULTS.get(word, word)
    return f" (default: {word})" if word else ""


def _violations(error: ValidationError, arguments: Sequence[str]) -> Iterator[str]:
    """What is wrong, each with the flag or the variable that says so."""
    for entry in error.errors(include_url=False):
        words = _WORDS_FOR_FAULTS.get(entry["type"])
        if words is None:
            fault = entry["msg"].removeprefix("Value error, ")
        else:
            limits = {key: str(value).removesuffix(".0") for key, value in entry.get("ctx", {}).items()}
            fault = f"must be {words.format(**limits)}, not {entry['input']!r}"
        place = _place(entry["loc"], arguments)
        yield f"{place}: {fault}" if place else fault


def _place(location: tuple[int | str, ...], arguments: Sequence[str]) -> str:
    """The flag that was wrong, or its variable when that was; empty when it is several of them together."""
    if not location:
        return ""
    name = "-".join(map(str, location)).replace("_", "-")
    variable = f"TWINSTAGE_{name.replace('-', '_').upper()}"
    given = any(argument.partition("=")[0] in (f"--{name}", f"--no-{name}") for argument in arguments)
    return variable if not given and variable in os.environ else f"--{name}"
