"""A prompt that was seen before: time to its first token against the first time, and what crosses the channel."""

from __future__ import annotations

from bench.engines.protocol import Prompts
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import TimedRequest, serving, timed_request
from bench.summary import ratios
from twinstage.client import TwinstageClient

_PROMPT = 2_000
_KINDS = ("first time", "repeated")


def measure(context: Context) -> RowResult:
    length = 500 if context.quick else _PROMPT
    prompts = Prompts()
    requests: dict[str, list[TimedRequest]] = {kind: [] for kind in _KINDS}
    with (
        serving(context, threads=context.engines.threads, worker_flags=context.engines.own_flags) as cluster,
        TwinstageClient(cluster.address) as client,
    ):
        timed_request(client, prompts.next(length), max_tokens=4)  # warm
        for round_number in range(context.rounds):
            context.progress(f"repeated prompt, round {round_number + 1}")
            prompt = prompts.next(length)
            for kind in _KINDS:
                requests[kind].append(timed_request(client, prompt, max_tokens=4))
    return _result(requests, f"{length:,} tokens, {context.engines.precision}")


def _result(requests: dict[str, list[TimedRequest]], case: str) -> RowResult:
    measurements = []
    for kind, found in requests.items():
        values = {
            ("time to first token", "ms"): [1e3 * request.time_to_first_token_s for request in found],
            ("KV bytes over the channel", "MB"): [request.summary.placement.kv_bytes / 1e6 for request in found],
            ("prompt tokens from the cache", "tokens"): [
                float(request.summary.usage.cached_prompt_tokens) for request in found
            ],
        }
        for (quantity, unit), numbers in values.items():
            measurements.append(Measurement(case=case, engine=kind, quantity=quantity, unit=unit, values=numbers))
    first, repeated = (requests[kind] for kind in _KINDS)
    comparisons = [
        Comparison(
            case=case,
            what="time to first token, repeated / first time",
            values=ratios(*([request.time_to_first_token_s for request in found] for found in (repeated, first))),
            target=Target.at_most(0.15),
        ),
        Comparison(
            case=case,
            what="KV bytes over the channel, repeated / first time",
            values=ratios(
                *([float(request.summary.placement.kv_bytes) for request in found] for found in (repeated, first))
            ),
        ),
    ]
    return RowResult(measurements=measurements, comparisons=comparisons)


ROW = Row(name="prefix", title="Repeated prompt", measure=measure, limit_s=180)
