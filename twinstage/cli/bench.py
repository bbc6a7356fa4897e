"""`twinstage bench`: from its flags to a load run. What it does is in `bench_run`, imported when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from twinstage.cli.access_flags import AccessFlags
from twinstage.cli.bench_flags import LoadFlags, OutputFlags, PromptFlags, SamplingFlags, ServerFlags, SloFlags
from twinstage.cli.flags import takes_flag_groups

if TYPE_CHECKING:
    from twinstage.bench.options import LoadOptions, Slo, TraceOptions


@takes_flag_groups
def bench(
    *,
    server: ServerFlags,
    access: AccessFlags,
    load: LoadFlags,
    prompts: PromptFlags,
    sampling: SamplingFlags,
    slo: SloFlags,
    outputs: OutputFlags,
) -> None:
    """Load a server and measure it: throughput, latencies, goodput.

    Latencies count from when a request was due, so a server or a generator that falls behind cannot hide it. One
    Ctrl-C ends the run and shows what was measured. Exit code 1: every request failed; 130: interrupted.
    """
    from twinstage.cli import bench_run

    code = bench_run.run(
        load_options(server, load, prompts, sampling, slo),
        outputs=outputs,
        concurrencies=load.concurrencies,
        rates=load.rates,
        access=access.access(),
    )
    if code:
        raise typer.Exit(code)


def load_options(
    server: ServerFlags, load: LoadFlags, prompts: PromptFlags, sampling: SamplingFlags, slo: SloFlags
) -> LoadOptions:
    """The first run of what the flags ask for. Raises ConfigError."""
    from twinstage.bench.options import Arrivals, LoadOptions, PromptForm, Protocol, TokenRange
    from twinstage.client.options import Sampling

    concurrency, rate_per_s = load.first_level(has_trace=prompts.trace is not None)
    return LoadOptions(
        addresses=tuple(server.address),
        protocol=Protocol(server.protocol),
        model=server.model,
        timeout_s=server.timeout,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        arrivals=Arrivals(load.arrivals),
        max_in_flight=load.max_in_flight,
        requests=load.requests,
        duration_s=load.duration,
        warmup_requests=load.warmup,
        seed=load.seed,
        prompt_tokens=TokenRange.parse(prompts.prompt_tokens, flag="--prompt-tokens"),
        output_tokens=TokenRange.parse(prompts.output_tokens, flag="--output-tokens"),
        shared_prefix_tokens=prompts.shared_prefix_tokens,
        prompt_form=PromptForm(prompts.prompt_form),
        prompt_seed=prompts.prompt_seed,
        trace=_trace(prompts),
        vocabulary_size=prompts.vocabulary_size,
        max_model_len=prompts.max_model_len,
        sampling=Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
        ignore_eos=sampling.ignore_eos,
        slo=_slo(slo),
    )


def _trace(prompts: PromptFlags) -> TraceOptions | None:
    from twinstage.bench.options import TraceOptions

    if prompts.trace is None:
        return None
    return TraceOptions(path=prompts.trace, speed=prompts.trace_speed, scale=prompts.trace_scale)


def _slo(flags: SloFlags) -> Slo:
    from twinstage.bench.options import Slo

    return Slo(ttft_s=_seconds(flags.slo_ttft_ms), itl_s=_seconds(flags.slo_itl_ms), e2e_s=_seconds(flags.slo_e2e_ms))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
