"""What disaggregation adds to the time to the first token: one request, beside the same engine in one process.

Both compute with all cores, as the decode worker has nothing to do meanwhile. Disaggregated, the time goes from the
client's call to the first token's arrival there: router, reservation and three processes are in it.
"""

from __future__ import annotations

from bench.engines.protocol import Prompts
from bench.results import Comparison, Curve, Measurement, RowResult, Series, Target
from bench.row import Context, Row
from bench.serving import serving, timed_request
from bench.summary import summarize
from twinstage.client import TwinstageClient

_LENGTHS = (128, 512, 2_000)
_FIXED_S, _SHARE = 0.005, 0.02  # the target: at most 5 ms and 2 % more
_ONE_PROCESS, _DISAGGREGATED = "one process", "disaggregated"


def measure(context: Context) -> RowResult:
    lengths = _LENGTHS[:2] if context.quick else _LENGTHS
    engine = context.engine("twinstage", **context.engines.own[0])
    prompts = Prompts()
    times: dict[tuple[int, str], list[float]] = {
        (n, kind): [] for n in lengths for kind in (_ONE_PROCESS, _DISAGGREGATED)
    }
    flags = context.engines.own_flags
    with (
        serving(context, threads=context.engines.threads, worker_flags=flags) as cluster,
        TwinstageClient(cluster.address) as client,
    ):
        for length in lengths:
            context.progress(f"time to the first token, {length} tokens")
            for round_number in range(-1 if length == lengths[0] else 0, context.rounds):
                alone_s = engine.prefill(length)
                served_s = timed_request(client, prompts.next(length), max_tokens=2).time_to_first_token_s
                if round_number >= 0:
                    times[length, _ONE_PROCESS].append(alone_s)
                    times[length, _DISAGGREGATED].append(served_s)
    return result_of(times, precision=context.engines.precision, versions=engine.versions)


def result_of(times: dict[tuple[int, str], list[float]], *, precision: str, versions: dict[str, str]) -> RowResult:
    """`times` in seconds, by length and kind, a value per round."""
    return RowResult(
        measurements=[
            Measurement(
                case=f"{length} tokens",
                engine=f"Twinstage {precision}, {kind}",
                quantity="time to first token",
                unit="ms",
                values=[1e3 * value for value in values],
            )
            for (length, kind), values in times.items()
        ],
        comparisons=_added(times, precision),
        curves=[_curve(times, precision)],
        versions=versions,
    )


def _added(times: dict[tuple[int, str], list[float]], precision: str) -> list[Comparison]:
    """What disaggregation adds, by length."""
    comparisons = []
    for length in dict.fromkeys(length for length, _ in times):
        alone, served = times[length, _ONE_PROCESS], times[length, _DISAGGREGATED]
        limit_s = _FIXED_S + _SHARE * summarize(alone).median
        comparisons.append(
            Comparison(
                case=f"{length} tokens",
                what=f"time to first token, added by disaggregation, Twinstage {precision}",
                values=[1e3 * (with_s - without_s) for with_s, without_s in zip(served, alone, strict=True)],
                target=Target.at_most(round(1e3 * limit_s, 1)),
                unit="ms",
            )
        )
    return comparisons


def _curve(times: dict[tuple[int, str], list[float]], precision: str) -> Curve:
    """Medians over prompt length, a line for each kind."""
    series = [
        Series(
            name=kind,
            points=[(float(n), 1e3 * summarize(values).median) for (n, of), values in times.items() if of == kind],
        )
        for kind in (_ONE_PROCESS, _DISAGGREGATED)
    ]
    return Curve(
        name="first_token",
        title=f"Time to first token over prompt length, one request, {precision}",
        x_label="prompt [tokens]",
        y_label="ms",
        series=series,
    )


ROW = Row(
    name="first_token", title="Time to first token, disaggregated against one process", measure=measure, limit_s=240
)
