"""`RESULTS.md`: the reports of all rows as tables, targets first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.results import Comparison, Measurement, RowReport

_HEAD = """\
# Results

Measured by `make bench`; do not edit, `python -m bench --render` writes this page from `results/*.json`. Medians of the
rounds, with the lowest and the highest in brackets. A ratio is taken within each round, in which all engines were
measured one after the other on the same machine with the same model (SmolLM2-135M-Instruct).
Without flags, Twinstage runs in fp32.
"""


def render(reports: Sequence[RowReport]) -> str:
    """The page. `reports` in the order of the table."""
    parts = [_HEAD, *_machine(reports), "## Targets\n", *_targets(reports)]
    for report in reports:
        parts += _section(report)
    return "\n".join(parts).rstrip() + "\n"


def number(value: float) -> str:
    """About three significant digits, with separators of thousands."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    if size < 0.01:
        return f"{value:.2g}"
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1}f}"


def spread(entry: Measurement | Comparison) -> str:
    """`median (lowest .. highest)`; the median alone where there is one value."""
    summary = entry.summary
    if summary.count == 1:
        return number(summary.median)
    return f"{number(summary.median)} ({number(summary.lowest)} .. {number(summary.highest)})"


def _machine(reports: Sequence[RowReport]) -> list[str]:
    """A line for each machine that took part; usually one."""
    lines = []
    for machine in _distinct([report.machine for report in reports]):
        rows = [report.row for report in reports if report.machine == machine]
        lines.append(
            f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['features'])}), "
            f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}"
            + ("" if len(rows) == len(reports) else f" for {', '.join(rows)}")
            + ".\n"
        )
    versions: dict[str, set[str]] = {}
    for report in reports:
        for name, version in report.versions.items():
            if name != "twinstage":  # said below each row, as it may differ
                versions.setdefault(name, set()).add(version)
    if versions:
        described = (f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items()))
        lines.append(f"{'; '.join(described)}.\n")
    return lines


def _distinct(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _targets(reports: Sequence[RowReport]) -> list[str]:
    lines = ["| row | case | what | measured | target | met |", "|---|---|---|---|---|---|"]
    for report in reports:
        for entry in report.result.comparisons if report.result is not None else ():
            if entry.target is not None:
                unit = f" {entry.unit}" if entry.unit else ""
                lines.append(
                    f"| {report.row} | {entry.case} | {entry.what} | {spread(entry)}{unit} | "
                    f"{entry.target.relation} {entry.target.limit:g}{unit} | {_verdict(entry)} |"
                )
    return [*lines, ""]


def _verdict(entry: Comparison) -> str:
    """Whether the median reaches the target; where it does not, how far it is away, as a share of the target."""
    if entry.target is None or entry.is_met:
        return "yes"
    distance = abs(entry.summary.median / entry.target.limit - 1)
    return f"no: {distance:.1%} {'below' if entry.target.relation == '>=' else 'above'}"


def _section(report: RowReport) -> list[str]:
    parts = [f"## {report.title}\n"]
    if report.error:
        parts.append(f"**Not measured**: {report.error}\n")
    if report.result is not None:
        parts += _measurements(report.result.measurements)
        parts += _other_comparisons(report.result.comparisons)
        parts += [f"![{curve.title}](plots/{curve.name}.svg)\n" for curve in report.result.curves]
        parts += [f"- {note}" for note in report.result.notes]
    remarks = report.load.get("remarks", [])
    if remarks:
        parts.append(f"- The machine was **not quiet**: {'; '.join(remarks)}.")
    quick = ", quick" if report.quick else ""
    parts.append(
        f"\n`python -m bench {report.row}`{quick}, Twinstage {report.versions['twinstage']}, {report.started}, "
        f"{report.seconds:.0f} s, load average before it {report.load.get('load_average', 0):g}.\n"
    )
    return parts


def _measurements(entries: Sequence[Measurement]) -> list[str]:
    """A table with a row per case and a column per engine for each quantity."""
    parts = []
    for quantity, unit in dict.fromkeys((entry.quantity, entry.unit) for entry in entries):
        chosen = {
            (entry.case, entry.engine): entry for entry in entries if (entry.quantity, entry.unit) == (quantity, unit)
        }
        engines = list(dict.fromkeys(engine for _, engine in chosen))
        parts += [
            f"| {quantity}{f' [{unit}]' if unit else ''} | {' | '.join(engines)} |",
            "|---" * (len(engines) + 1) + "|",
        ]
        for case in dict.fromkeys(case for case, _ in chosen):
            cells = [spread(chosen[case, engine]) if (case, engine) in chosen else "" for engine in engines]
            parts.append(f"| {case} | {' | '.join(cells)} |")
        parts.append("")
    return parts


def _other_comparisons(entries: Sequence[Comparison]) -> list[str]:
    """Those without a target; the others stand at the top of the page."""
    chosen = [entry for entry in entries if entry.target is None]
    if not chosen:
        return []
    lines = ["| case | what | measured |", "|---|---|---|"]
    for entry in chosen:
        unit = f" {entry.unit}" if entry.unit else ""
        lines.append(f"| {entry.case} | {entry.what} | {spread(entry)}{unit} |")
    return [*lines, ""]
