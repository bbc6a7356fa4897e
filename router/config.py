"""The router's settings: flags, then `TWINSTAGE_*` variables, then defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from router.discovery import WorkerSource, parse_source
from twinstage.errors import ConfigError


class RouterSettings(BaseSettings):
    """Twinstage router: accepts requests, and places them on prefill and decode workers."""

    model_config = SettingsConfigDict(
        env_prefix="TWINSTAGE_",
        cli_prog_name="python -m router",
        cli_kebab_case=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="ignore",
    )

    listen: str = Field(default="0.0.0.0:50051", description="host:port of the gRPC server; port 0 takes a free one.")
    workers: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="A worker as host:port, or all workers behind a name as dns:///name:port. Repeat the flag, or "
        "separate by commas.",
    )
    max_live_requests: int = Field(default=256, ge=1, description="Requests in progress at once; more wait.")
    max_queued_requests: int = Field(default=256, ge=0, description="Requests that may wait; more are refused.")
    default_timeout: float = Field(
        default=600.0, gt=0, description="Seconds that a request may take whose client sets no deadline."
    )
    max_timeout: float = Field(default=3600.0, gt=0, description="Seconds that any request may take.")
    report_interval: float = Field(
        default=0.5,
        ge=0.05,
        le=60,
        description="Seconds between load reports of a worker; after three without one it is taken for lost.",
    )
    lookup_interval: float = Field(default=5.0, gt=0, description="Seconds between look-ups of dns:/// names.")
    tokenizer_threads: int = Field(default=2, ge=1, description="Threads that tokenize and render prompts.")
    drain_timeout: float = Field(
        default=30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )
    log_format: Literal["console", "json"] = Field(default="console", description="How log lines look.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )

    @field_validator("workers", mode="before")
    @classmethod
    def _split_workers(cls, value: object) -> object:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, Sequence):
            return values
        return [part.strip() for entry in values for part in str(entry).split(",") if part.strip()]

    def sources(self) -> list[WorkerSource]:
        """Where to find workers. Raises ConfigError when there is nowhere, or a value cannot be read."""
        if not self.workers:
            raise ConfigError("no workers: pass --workers host:port or --workers dns:///name:port")
        return [parse_source(value) for value in dict.fromkeys(self.workers)]
