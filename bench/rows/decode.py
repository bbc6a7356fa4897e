"""Output tokens per second of sequences that decode together: B sequences, each with a context of its own."""

from __future__ import annotations

from dataclasses import dataclass

from bench.contest import Contest, Engine
from bench.results import Curve, RowResult, Series, Target
from bench.row import Context, Row


@dataclass(frozen=True, slots=True)
class Case:
    """`steps` are enough for half a second or more, and few enough that the context stays what the name says."""

    batch: int
    context: int
    steps: int
    target: float

    @property
    def name(self) -> str:
        return f"B={self.batch}, context {self.context:,}"

    def tokens_per_s(self, engine: Engine) -> float:
        seconds = engine.decode(batch=self.batch, context=self.context, steps=self.steps)
        return self.batch * self.steps / seconds


CASES = (
    Case(1, 200, 32, 1.0),
    Case(4, 200, 16, 1.8),
    Case(8, 200, 16, 1.8),
    Case(16, 200, 8, 2.0),
    Case(32, 200, 8, 2.0),
    Case(1, 2_000, 16, 1.0),
    Case(8, 2_000, 8, 1.0),
)
_QUICK = ("B=1, context 200", "B=8, context 200")


def measure(context: Context) -> RowResult:
    contest = Contest.start(context, peers=("llama", "transformers"))
    for case in CASES:
        if not context.quick or case.name in _QUICK:
            contest.measure(
                case.name,
                case.tokens_per_s,
                quantity="decode",
                unit="tokens/s",
                targets={"llama.cpp": Target.at_least(case.target)},
            )
    contest.curves.append(decode_curve(contest))
    return contest.result()


def decode_curve(contest: Contest) -> Curve:
    """Output tokens per second over the batch at a context of 200, a line per engine."""
    series = []
    for name in dict.fromkeys(measurement.engine for measurement in contest.measurements):
        found = {entry.case: entry.summary.median for entry in contest.measurements if entry.engine == name}
        points = [(float(case.batch), found[case.name]) for case in CASES if case.context == 200 and case.name in found]
        series.append(Series(name=name, points=points))
    return Curve(
        name="decode",
        title="Decode throughput over batch, context 200",
        x_label="sequences",
        y_label="tokens/s",
        series=series,
        logarithmic=True,
    )


ROW = Row(name="decode", title="Decode throughput", measure=measure, limit_s=480, peers=("llama",))
