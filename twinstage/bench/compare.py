"""Two documents side by side: each figure of ours as a multiple of the other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinstage.errors import ConfigError

# Path in a run, name, unit, whether more is better.
_FIGURES = (
    ("output_tokens_per_s", "output tokens/s", "", True),
    ("requests_per_s", "requests/s", "", True),
    ("goodput.share", "good requests", "share", True),
    ("ttft.p50_s", "time to first token, p50", "s", False),
    ("ttft.p99_s", "time to first token, p99", "s", False),
    ("itl.p50_s", "inter-token gap, p50", "s", False),
    ("itl.p99_s", "inter-token gap, p99", "s", False),
    ("tpot.p50_s", "time per output token, p50", "s", False),
    ("e2e.p50_s", "end to end, p50", "s", False),
    ("e2e.p99_s", "end to end, p99", "s", False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure of two runs. `ratio` is ours by theirs; `is_better` says whether that is for the better."""

    label: str
    figure: str
    unit: str
    ours: float
    theirs: float
    is_better: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Ratio]:
    """The figures that runs of the same load have in both documents; single runs are compared whatever their load.

    Raises ConfigError when no run of one has a counterpart in the other.
    """
    pairs = _pairs(ours["runs"], theirs["runs"])
    if not pairs:
        labels = ", ".join(run["label"] for run in theirs["runs"]) or "none"
        raise ConfigError(f"--compare: no run there has the load of one here (there: {labels})")
    return [
        Ratio(label=label, figure=name, unit=unit, ours=mine, theirs=other, is_better=(mine > other) is more_is_better)
        for label, our_run, their_run in pairs
        for path, name, unit, more_is_better in _FIGURES
        if (mine := _figure(our_run, path)) is not None and (other := _figure(their_run, path))
    ]


def _pairs(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    if len(ours) == len(theirs) == 1:
        first, second = ours[0]["label"], theirs[0]["label"]
        return [(first if first == second else f"{first} / {second}", ours[0], theirs[0])]
    by_label = {run["label"]: run for run in theirs}
    return [(run["label"], run, by_label[run["label"]]) for run in ours if run["label"] in by_label]


def _figure(run: Mapping[str, Any], path: str) -> float | None:
    value: Any = run
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None
