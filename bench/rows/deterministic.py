"""What deterministic mode costs on stock modules: the same work with and without it, in turn."""

from __future__ import annotations

from bench.contest import Contest, Rate
from bench.results import Comparison, RowResult
from bench.row import Context, Row
from bench.summary import ratios
from twinstage.hosting.settings import WorkerSettings

CONTEXT = 200  # tokens that each decoding sequence has
STEPS = {1: 32, 4: 16, 8: 16, 16: 8, 32: 8}  # batch -> steps that are timed
_QUICK = ("512 tokens", "B=1", "B=8")


def measure(context: Context) -> RowResult:
    stock = {"weights": "stock"} if "weights" in WorkerSettings.model_fields else {}
    engines = [context.engine("twinstage", **stock, deterministic=mode) for mode in ("no", "yes")]
    contest = Contest(context=context, engines=list(engines))
    for case, quantity, rate in _cases():
        if not context.quick or case in _QUICK:
            contest.measure(case, rate, quantity=quantity, unit="tokens/s", targets={})
    ordinary, deterministic = (engine.name for engine in engines)
    contest.comparisons += comparisons(contest, ordinary=ordinary, deterministic=deterministic)
    return contest.result()


def _cases() -> list[tuple[str, str, Rate]]:
    """Case, quantity, and the rate of an engine in it."""
    prefill = [(f"{length} tokens", "prefill", _prefill_rate(length)) for length in (128, 512)]
    return prefill + [(f"B={batch}", "decode", _decode_rate(batch, steps)) for batch, steps in STEPS.items()]


def _prefill_rate(length: int) -> Rate:
    return lambda engine: length / engine.prefill(length)


def _decode_rate(batch: int, steps: int) -> Rate:
    return lambda engine: batch * steps / engine.decode(batch=batch, context=CONTEXT, steps=steps)


def comparisons(contest: Contest, *, ordinary: str, deterministic: str) -> list[Comparison]:
    """The share of the ordinary rate that is left, round by round."""
    found = {(entry.case, entry.engine): entry for entry in contest.measurements}
    return [
        Comparison(
            case=case,
            what=f"{entry.quantity}, deterministic / ordinary",
            values=ratios(entry.values, found[case, ordinary].values),
        )
        for (case, engine), entry in found.items()
        if engine == deterministic and (case, ordinary) in found
    ]


ROW = Row(name="deterministic", title="Cost of deterministic mode (stock modules)", measure=measure, limit_s=480)
