"""The flags of commands that ask a router, and of `generate` and `chat` together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Draw from the fewest tokens that have this probability together.")
    ] = None
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw from so many of the likeliest tokens.")] = (
        None
    )
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Draw from tokens at least so likely, measured by the likeliest.")
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1, what has occurred becomes less likely.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random numbers.")] = None
    stop: Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text. Repeatable.")] = None
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File with a JSON schema that the text satisfies.")
    ] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="The text is a JSON object.")] = False
    regex: Annotated[
        str | None, typer.Option("--regex", help="Regular expression that matches the whole of the text.")
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option("--choice", help="The text is this or another choice. Repeatable.")
    ] = None
    grammar: Annotated[
        Path | None, typer.Option("--grammar", help="File with a grammar of the text, in EBNF (root ::= ...) or Lark.")
    ] = None
    structural_tag: Annotated[
        Path | None, typer.Option("--structural-tag", help="File with a structural tag of xgrammar, in JSON.")
    ] = None
    grammar_backend: Annotated[
        Literal["xgrammar", "llguidance"] | None,
        typer.Option("--grammar-backend", help="Library that holds the text to its form; by default the router's."),
    ] = None
    timeout: Timeout = None
    as_json: AsJson = False

    def options(self) -> Options:
        """Of the call."""
        from twinstage.client.options import Options, Sampling, Stopping

        return Options(
            model=self.model,
            sampling=Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                seed=self.seed,
            ),
            stopping=Stopping(max_tokens=self.max_tokens, stop=tuple(self.stop or ())),
            structured_output=self._structured_output(),
            timeout_s=self.timeout,
        )

    def _structured_output(self) -> StructuredOutput | None:
        """What the text obeys, by the one flag that says so. Raises ConfigError for several, or an unreadable file."""
        from twinstage.client import GrammarBackend, StructuredOutput

        makers: dict[str, tuple[object, Callable[..., StructuredOutput]]] = {
            "--json-schema": (self.json_schema, StructuredOutput.json_schema),
            "--json-object": (self.json_object, lambda _, **more: StructuredOutput.json_object(**more)),
            "--regex": (self.regex, StructuredOutput.regex),
            "--choice": (self.choice, StructuredOutput.choice),
            "--grammar": (self.grammar, StructuredOutput.grammar),
            "--structural-tag": (self.structural_tag, StructuredOutput.structural_tag),
        }
        given = [flag for flag, (value, _) in makers.items() if value not in (None, False, [])]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other")
        backend = GrammarBackend(self.grammar_backend) if self.grammar_backend is not None else None
        for flag in given:
            value, make = makers[flag]
            return make(_text_of(flag, value) if isinstance(value, Path) else value, backend=backend)
        if backend is not None:
            raise ConfigError("--grammar-backend needs one of " + ", ".join(makers))
        return None


def _text_of(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from error
