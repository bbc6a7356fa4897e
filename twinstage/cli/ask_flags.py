"""The flags of commands that ask a router, and of `generate` and `chat` together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstage.errors import ConfigError

if TYPE_CHECKING:
    from twinstage.client.options import Options, StructuredOutput

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_MAX_TOKENS = 256  # a terminal wants more than the API's 16 and less than a whole context

Address = Annotated[
    str,
    typer.Option(
        "--address", "--router", metavar="HOST:PORT", envvar="TWINSTAGE_ADDRESS", help="Where the router listens."
    ),
]
ModelName = Annotated[str, typer.Option("--model", help="Name of the model; by default the only one that is served.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Deadline of the call, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFlags:
    """How text is generated and shown."""

    address: Address = DEFAULT_ADDRESS
    model: ModelName = ""
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")] = (
        DEFAULT_MAX_TOKENS
    )
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="Softmax temperature; 0 takes the most likely token.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random numbers.")] = None
    stop: Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text. Repeatable.")] = None
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File with a JSON schema that the text satisfies.")
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="Regular expression that matches the whole of the text.")
    ] = None
    timeout: Timeout = None
    as_json: AsJson = False

    def options(self) -> Options:
        """Of the call."""
        from twinstage.client.options import Options, Sampling, Stopping

        return Options(
            model=self.model,
            sampling=Sampling(temperature=self.temperature, seed=self.seed),
            stopping=Stopping(max_tokens=self.max_tokens, stop=tuple(self.stop or ())),
            structured_output=self._structured_output(),
            timeout_s=self.timeout,
        )

    def _structured_output(self) -> StructuredOutput | None:
        from twinstage.client.options import StructuredOutput

        if self.json_schema is not None and self.regex is not None:
            raise ConfigError("--json-schema and --regex exclude each other")
        if self.regex is not None:
            return StructuredOutput.regex(self.regex)
        if self.json_schema is None:
            return None
        try:
            return StructuredOutput.json_schema(self.json_schema.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--json-schema {self.json_schema} cannot be read: {error}") from error
