"""`twinstage bench`: its options. What it does is in `bench_run`, which is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from twinstage.errors import ConfigError

DEFAULT_CONCURRENCY = 4


def bench(
    address: Annotated[
        list[str],
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            envvar="TWINSTAGE_ADDRESS",
            help="Server to load; with --protocol openai a URL. Repeatable: several take turns.",
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer wants a list
    protocol: Annotated[
        Literal["twinstage", "openai"], typer.Option(help="How the server is spoken to.")
    ] = "twinstage",
    model: Annotated[str, typer.Option(help="Name of the model; by default the only one that is served.")] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help=f"Closed loop: requests kept in progress. Default: {DEFAULT_CONCURRENCY}."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second, whether or not earlier ones are answered.")
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "constant"], typer.Option(help="How arrivals of --rate are spaced.")
    ] = "poisson",
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Open loop: most requests in progress; waiting for a place counts.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests. Default: what suits the load.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests are sent.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Requests before the measurement. Default: as many as run at once.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Prompt length in tokens.")] = "128",
    output_tokens: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Output length in tokens.")] = "128",
    shared_prefix_tokens: Annotated[
        int, typer.Option(min=0, help="How many of the prompt's tokens are the same in all prompts.")
    ] = 0,
    prompt_form: Annotated[
        Literal["ids", "text"], typer.Option(help="Send token ids, or text of that many tokens.")
    ] = "ids",
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay a trace (Mooncake's JSON lines); with --concurrency its lengths alone."),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="Play the trace so many times as fast.")] = 1.0,
    trace_scale: Annotated[float, typer.Option(help="Divide the trace's lengths by this.")] = 1.0,
    vocabulary_size: Annotated[
        int | None, typer.Option(min=2, help="Token ids are below this; asked from the server where it says it.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Context of the model; asked from the server where it says it.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Softmax temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of the probability mass to draw from.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Most likely tokens to draw from.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate all output tokens, whatever the model thinks of ending.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Deadline of each request in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of arrival times, lengths and sampling.")] = 0,
    prompt_seed: Annotated[
        int | None, typer.Option(help="Seed of what prompts contain. Default: another one each time.")
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="A good request's time to first token.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(help="A good request's mean time per later token.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="A good request's time in all.")] = None,
    sweep_concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="One run for each of these concurrencies.")
    ] = "",
    sweep_rate: Annotated[str, typer.Option(metavar="R,R,...", help="One run for each of these rates.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is standard output.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with charts: one file, no links.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JSON line for each request as it ends.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON of an earlier run to compare with.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    fail_on_error: Annotated[bool, typer.Option("--fail-on-error", help="Exit with 1 if any request failed.")] = False,
) -> None:
    """Load a server and measure it: throughput, latencies, goodput.

    Latencies count from when a request was due, so a server or a generator that falls behind cannot hide it. One
    Ctrl-C ends the run and shows what was measured. Exit code 1: every request failed; 130: interrupted.
    """
    from twinstage.bench.options import Arrivals, LoadOptions, PromptForm, Protocol, Slo, TokenRange, TraceOptions
    from twinstage.cli import bench_run
    from twinstage.client.options import Sampling

    concurrencies = [int(number) for number in _numbers(sweep_concurrency, "--sweep-concurrency")]
    rates = _numbers(sweep_rate, "--sweep-rate")
    if concurrency is None and rate is None and trace is None:
        concurrency = None if rates and not concurrencies else (concurrencies or [DEFAULT_CONCURRENCY])[0]
        rate = rates[0] if concurrency is None else None
    options = LoadOptions(
        addresses=tuple(address),
        protocol=Protocol(protocol),
        model=model,
        concurrency=concurrency,
        rate_per_s=rate,
        arrivals=Arrivals(arrivals),
        max_in_flight=max_in_flight,
        requests=requests,
        duration_s=duration,
        warmup_requests=warmup,
        prompt_tokens=TokenRange.parse(prompt_tokens, flag="--prompt-tokens"),
        output_tokens=TokenRange.parse(output_tokens, flag="--output-tokens"),
        shared_prefix_tokens=shared_prefix_tokens,
        prompt_form=PromptForm(prompt_form),
        trace=None if trace is None else TraceOptions(path=trace, speed=trace_speed, scale=trace_scale),
        vocabulary_size=vocabulary_size,
        max_model_len=max_model_len,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k),
        ignore_eos=ignore_eos,
        timeout_s=timeout,
        seed=seed,
        prompt_seed=prompt_seed,
        slo=Slo(ttft_s=_seconds(slo_ttft_ms), itl_s=_seconds(slo_itl_ms), e2e_s=_seconds(slo_e2e_ms)),
    )
    outputs = bench_run.Outputs(
        json_file=json_file, html_file=html_file, records_file=records, compare_file=compare, quiet=quiet
    )
    code = bench_run.run(
        options, outputs=outputs, concurrencies=concurrencies, rates=rates, fail_on_error=fail_on_error
    )
    if code:
        raise typer.Exit(code)


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{flag}: expected numbers such as 1,2,4, not {text!r}") from None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
