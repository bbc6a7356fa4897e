"""What a row found, as values, and their form in JSON.

A file `results/ROW.json` is one `RowReport`. Medians and spreads in it are for readers; only `values` is read back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from bench.summary import Summary, summarize

SCHEMA = 1  # raise it whenever an older file would be misread


@dataclass(frozen=True, slots=True)
class Target:
    """What a comparison should reach: at least or at most `limit`."""

    relation: Literal[">=", "<="]
    limit: float

    @classmethod
    def at_least(cls, limit: float) -> Self:
        return cls(">=", limit)

    @classmethod
    def at_most(cls, limit: float) -> Self:
        return cls("<=", limit)

    def is_met_by(self, value: float) -> bool:
        return value >= self.limit if self.relation == ">=" else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one engine did in one case; a value per round. `case` such as "512 tokens", `unit` such as "tokens/s"."""

    case: str
    engine: str
    quantity: str
    unit: str
    values: Sequence[float]

    @property
    def summary(self) -> Summary:
        return summarize(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a target is held against: a ratio (`unit` "") or another number per round."""

    case: str
    what: str
    values: Sequence[float]
    target: Target | None = None
    unit: str = ""

    @property
    def summary(self) -> Summary:
        return summarize(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the target; None without one."""
        return None if self.target is None else self.target.is_met_by(self.summary.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One plot, drawn to `plots/<name>.svg`. `logarithmic` concerns the x axis."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """What a row returns."""

    measurements: Sequence[Measurement] = ()
    comparisons: Sequence[Comparison] = ()
    curves: Sequence[Curve] = ()
    notes: Sequence[str] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of the engines that took part


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """A row's file. `error` says why `result` is missing. `machine` and `load` are as `bench.machine` gives them."""

    row: str
    title: str
    quick: bool
    started: str  # UTC, ISO 8601
    seconds: float
    machine: dict[str, Any]
    load: dict[str, Any]
    versions: dict[str, str]
    result: RowResult | None
    error: str = ""


def write_report(report: RowReport, directory: Path) -> Path:
    """Write `directory/<row>.json`; a reader never sees half a file."""
    document = {"schema": SCHEMA, **asdict(report)}
    if report.result is not None:
        for kind in ("measurements", "comparisons"):
            for entry, value in zip(document["result"][kind], getattr(report.result, kind), strict=True):
                entry.update(asdict(value.summary))
        for entry, comparison in zip(document["result"]["comparisons"], report.result.comparisons, strict=True):
            entry["met"] = comparison.is_met
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report.row}.json"
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def read_report(path: Path) -> RowReport:
    """Raises ValueError when the file is not a report of this schema."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is not a result of schema {SCHEMA}; measure that row again")
    result = document.pop("result")
    return RowReport(**document, result=None if result is None else _result_from(result))


def _result_from(document: dict[str, Any]) -> RowResult:
    return RowResult(
        measurements=[_only(Measurement, entry) for entry in document["measurements"]],
        comparisons=[
            _only(Comparison, {**entry, "target": None if entry["target"] is None else Target(**entry["target"])})
            for entry in document["comparisons"]
        ],
        curves=[
            Curve(
                **{
                    **entry,
                    "series": [
                        Series(name=series["name"], points=[(x, y) for x, y in series["points"]])
                        for series in entry["series"]
                    ],
                }
            )
            for entry in document["curves"]
        ],
        notes=document["notes"],
        versions=document["versions"],
    )


def _only(kind: Any, entry: dict[str, Any]) -> Any:
    """`kind` of those values in `entry` that it has."""
    return kind(**{name: entry[name] for name in kind.__dataclass_fields__ if name in entry})
