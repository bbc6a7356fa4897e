"""How the time of a decode step grows with the batch and with the context."""

from __future__ import annotations

from bench.results import Curve, Measurement, RowResult, Series
from bench.row import Context, Row
from bench.summary import summarize

_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (128, 512, 1_024, 2_048, 4_096)
_MOST_TOKENS = 16_384  # of all sequences together: what the engine's KV memory holds


def measure(context: Context) -> RowResult:
    engine = context.engine("twinstage", **context.engines.own[0])
    steps = 4 if context.quick else 8
    batches, contexts = (_BATCHES[::2], _CONTEXTS[:2]) if context.quick else (_BATCHES, _CONTEXTS)
    step_ms: dict[tuple[int, int], list[float]] = {}
    for length in contexts:
        for batch in batches:
            if batch * length > _MOST_TOKENS:
                continue
            context.progress(f"step time, B={batch}, context {length}")
            values = [engine.decode(batch=batch, context=length, steps=steps) for _ in range(context.rounds)]
            step_ms[batch, length] = [1e3 * value / steps for value in values]
    return RowResult(
        measurements=[
            Measurement(
                case=f"context {length:,}", engine=f"B={batch}", quantity="decode step", unit="ms", values=values
            )
            for (batch, length), values in step_ms.items()
        ],
        curves=_curves(step_ms, name=engine.name),
        versions=engine.versions,
        notes=[f"Measured with {engine.name}, at most {_MOST_TOKENS:,} tokens of all sequences together."],
    )


def _curves(step_ms: dict[tuple[int, int], list[float]], *, name: str) -> list[Curve]:
    """`step_ms` by batch and context; once over each, a line for each value of the other."""
    medians = {case: summarize(values).median for case, values in step_ms.items()}
    return [
        Curve(
            name="step_over_batch",
            title=f"Time of a decode step over the batch, {name}",
            x_label="sequences",
            y_label="ms",
            series=[
                Series(
                    name=f"context {length:,}",
                    points=[(float(b), value) for (b, n), value in medians.items() if n == length],
                )
                for length in dict.fromkeys(length for _, length in medians)
            ],
        ),
        Curve(
            name="step_over_context",
            title=f"Time of a decode step over the context, {name}",
            x_label="context [tokens]",
            y_label="ms",
            series=[
                Series(name=f"B={batch}", points=[(float(n), value) for (b, n), value in medians.items() if b == batch])
                for batch in dict.fromkeys(batch for batch, _ in medians)
            ],
        ),
    ]


ROW = Row(name="growth", title="Growth of the step time", measure=measure, limit_s=300, quick=False)
