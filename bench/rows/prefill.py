"""Prompt tokens per second: from a prompt that no cache knows to its first token, one prompt at a time."""

from __future__ import annotations

from bench.contest import Contest
from bench.peers import PeerMissing
from bench.peers.served_prefill import ServedPrefill
from bench.results import Curve, RowResult, Series, Target
from bench.row import Context, Row

# Prompt length in tokens -> the ratio to llama.cpp that we want.
_TARGETS = {128: 1.4, 512: 1.6, 2_000: 1.8}
_VLLM_TARGET = 2.0


def measure(context: Context) -> RowResult:
    contest = Contest.start(context, peers=("llama", "transformers"))
    _add_vllm(context, contest)
    lengths = [128, 512] if context.quick else list(_TARGETS)
    for length in lengths:
        contest.measure(
            f"{length} tokens",
            lambda engine, length=length: length / engine.prefill(length),  # type: ignore[misc]
            quantity="prefill",
            unit="tokens/s",
            targets={"llama.cpp": Target.at_least(_TARGETS[length]), "vLLM": Target.at_least(_VLLM_TARGET)},
            warm_up=length < 1_000,  # the shorter prompts have warmed everything up
        )
    contest.curves.append(prefill_curve(contest, lengths))
    return contest.result()


def _add_vllm(context: Context, contest: Contest) -> None:
    """Let vLLM take part through its server, as its engine has no way to be driven step by step."""
    if context.peers is None:
        return
    try:
        contest.engines.append(ServedPrefill(context.peers.vllm(), version=context.peers.version("vllm")))
    except PeerMissing as error:
        contest.notes.append(f"Without vLLM: {error}")
    else:
        contest.notes.append("vLLM is measured through its HTTP server, with token ids as the prompt.")
        contest.notes.append(f"vLLM ran with {context.peers.settings['vllm']}.")


def prefill_curve(contest: Contest, lengths: list[int]) -> Curve:
    """Prompt tokens per second over prompt length, a line per engine."""
    series = []
    for name in dict.fromkeys(measurement.engine for measurement in contest.measurements):
        found = {entry.case: entry.summary.median for entry in contest.measurements if entry.engine == name}
        points = [(float(length), found[f"{length} tokens"]) for length in lengths if f"{length} tokens" in found]
        series.append(Series(name=name, points=points))
    return Curve(
        name="prefill",
        title="Prefill throughput over prompt length",
        x_label="prompt [tokens]",
        y_label="tokens/s",
        series=series,
        logarithmic=True,
    )


ROW = Row(
    name="prefill", title="Prefill throughput", measure=measure, limit_s=480, peers=("llama", "vllm"), needs_vllm=True
)
