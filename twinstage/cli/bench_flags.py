"""The flags of `twinstage bench`, by what they are about."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from twinstage.errors import ConfigError

DEFAULT_CONCURRENCY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """What is loaded."""

    address: Annotated[
        list[str],
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            envvar="TWINSTAGE_ADDRESS",
            help="Server to load; with --protocol openai a URL. Repeatable: several take turns.",
        ),
    ] = field(default_factory=lambda: ["127.0.0.1:50051"])
    protocol: Annotated[Literal["twinstage", "openai"], typer.Option(help="How the server is spoken to.")] = "twinstage"
    model: Annotated[str, typer.Option(help="Name of the model; by default the only one that is served.")] = ""
    timeout: Annotated[float, typer.Option(help="Deadline of each request in seconds.")] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """How many requests, and when."""

    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Closed loop: requests kept in progress. Default: {DEFAULT_CONCURRENCY}."),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, whether or not earlier ones are answered.")
    ] = None
    arrivals: Annotated[Literal["poisson", "constant"], typer.Option(help="How arrivals of --rate are spaced.")] = (
        "poisson"
    )
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Open loop: most requests in progress; waiting for a place counts.")
    ] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests. Default: what suits the load.")] = (
        None
    )
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests are sent.")] = None
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Requests before the measurement. Default: as many as run at once.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of arrival times, lengths and sampling.")] = 0
    sweep_concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="One run for each of these concurrencies.")
    ] = ""
    sweep_rate: Annotated[str, typer.Option(metavar="R,R,...", help="One run for each of these rates.")] = ""

    @property
    def concurrencies(self) -> list[int]:
        """Raises ConfigError when the sweep's are no numbers."""
        return [int(number) for number in _numbers(self.sweep_concurrency, "--sweep-concurrency")]

    @property
    def rates(self) -> list[float]:
        """Raises ConfigError when the sweep's are no numbers."""
        return _numbers(self.sweep_rate, "--sweep-rate")

    def first_level(self, *, has_trace: bool) -> tuple[int | None, float | None]:
        """Concurrency and rate of the first run: as given, else the sweep's first, else the default."""
        if self.concurrency is not None or self.rate is not None or has_trace:
            return self.concurrency, self.rate
        if self.rates and not self.concurrencies:
            return None, self.rates[0]
        return (self.concurrencies or [DEFAULT_CONCURRENCY])[0], None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """How long prompts and answers are, and what prompts contain."""

    prompt_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Prompt length in tokens.")] = "128"
    output_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Output length in tokens.")] = "128"
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="How many of the prompt's tokens are the same in all prompts.")
    ] = 0
    prompt_form: Annotated[
        Literal["ids", "text"], typer.Option(help="Send token ids, or text of that many tokens.")
    ] = "ids"
    prompt_seed: Annotated[
        int | None, typer.Option(help="Seed of what prompts contain. Default: another one each time.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a trace (Mooncake's JSON lines); with --concurrency its lengths alone."),
    ] = None
    trace_speed: Annotated[float, typer.Option(help="Play the trace so many times as fast.")] = 1.0
    trace_scale: Annotated[float, typer.Option(help="Divide the trace's lengths by this.")] = 1.0
    vocabulary_size: Annotated[
        int | None, typer.Option(min=2, help="Token ids are below this; asked from the server where it says it.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Context of the model; asked from the server where it says it.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """How tokens are drawn."""

    temperature: Annotated[float, typer.Option(min=0, help="Softmax temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Nucleus of the probability mass to draw from.")] = None
    top_k: Annotated[int | None, typer.Option(min=1, help="Most likely tokens to draw from.")] = None
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate all output tokens, whatever the model thinks of ending.")
    ] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SloFlags:
    """What a good request is."""

    slo_ttft_ms: Annotated[float | None, typer.Option(help="A good request's time to first token.")] = None
    slo_itl_ms: Annotated[float | None, typer.Option(help="A good request's mean time per later token.")] = None
    slo_e2e_ms: Annotated[float | None, typer.Option(help="A good request's time in all.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """Where results go besides the terminal, what they are compared with, and what the exit code says."""

    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output.")
    ] = None
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with charts: one file, no links.")
    ] = None
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JSON line for each request as it ends.")
    ] = None
    compare: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON of an earlier run to compare with.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False
    fail_on_error: Annotated[bool, typer.Option("--fail-on-error", help="Exit with 1 if any request failed.")] = False


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{flag}: expected numbers such as 1,2,4, not {text!r}") from None
