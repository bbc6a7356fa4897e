"""The report as one HTML file: tables and charts, in light and dark, without anything from elsewhere.

Every text passes `escape`: names and messages come from servers and files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from twinstage.bench.compare import Ratio
from twinstage.bench.figures import LATENCY_TITLES, SWEEP_TITLES, human_seconds, latency_rows, sweep_row, total_rows
from twinstage.bench.results import Bar, Distribution, LoadResult
from twinstage.bench.svg import Axes, Block, Series, bar_chart, line_chart, short

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--fore:#1d2330;--soft:#5b6472;--line:#d9dee6;--panel:#f6f8fa;--warn:#9a5b00;
--s0:#2563c9;--s1:#c2410c;--s2:#15803d;--s3:#7c3aed}
@media(prefers-color-scheme:dark){:root{--back:#12161d;--fore:#e4e8ee;--soft:#9aa5b4;--line:#2e3642;--panel:#1a2029;
--warn:#f0b455;--s0:#6ea8ff;--s1:#ff9a5c;--s2:#5fd38a;--s3:#b79bff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1360px;padding:24px;background:var(--back);color:var(--fore);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:32px 0 8px}p{margin:4px 0;color:var(--soft)}
table{border-collapse:collapse;margin:12px 0;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--line);text-align:right;
vertical-align:top}
th{color:var(--soft);font-weight:600}th:first-child,td:first-child,.words td{text-align:left}
.pairs td:nth-child(2),.pairs th:nth-child(2){text-align:left}
.warning{color:var(--warn);font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;margin:16px 0}
svg{width:100%;height:auto;background:var(--panel);border:1px solid var(--line);border-radius:8px;font-size:12px}
svg text{fill:var(--soft)}svg .title{fill:var(--fore);font-size:13px;font-weight:600}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.bar{fill:var(--s0)}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}.line.s3{stroke:var(--s3)}
.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}
svg .legend{font-weight:600}svg .legend.s0{fill:var(--s0)}svg .legend.s1{fill:var(--s1)}
svg .legend.s2{fill:var(--s2)}svg .legend.s3{fill:var(--s3)}
summary h2{display:inline;color:var(--fore)}
summary{cursor:pointer;color:var(--soft)}pre{overflow-x:auto;background:var(--panel);padding:12px;border-radius:8px}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_report(document: Mapping[str, Any], results: Sequence[LoadResult], ratios: Sequence[Ratio] = ()) -> str:
    """The report of one or more runs. `document` is theirs as JSON types; `ratios` compare them with others."""
    model = results[0].model if results else ""
    title = f"Load test of {model}" if model else "Load test"
    options = document["options"]
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_introduction(options, results))}</p>"]
    if len(results) > 1:
        body += _sweep_section(results)
    if ratios:
        body += ["<h2>Compared</h2>", _ratio_table(ratios)]
    for result in results:
        body += _run_section(result, is_folded=len(results) > 1)
    everything = json.dumps({"machine": document["machine"], "options": options}, indent=1, ensure_ascii=False)
    body.append(f"<details><summary>Options and machine</summary><pre>{escape(everything)}</pre></details>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>" + "\n".join(body) + "</body></html>\n"
    )


def _introduction(options: Mapping[str, Any], results: Sequence[LoadResult]) -> str:
    when = results[0].started_at if results else ""
    return f"{', '.join(options['addresses'])} by {options['protocol']}, begun {when}, by twinstage bench"


# --- sections -------------------------------------------------------------------------------------


def _sweep_section(results: Sequence[LoadResult]) -> list[str]:
    levels = [result.label.removeprefix("concurrency ").removeprefix("rate ") for result in results]
    x_label = "concurrency" if all(result.concurrency for result in results) else "load"

    def chart(title: str, y_label: str, lines: Mapping[str, Sequence[float | None]]) -> str:
        axes = Axes(title=title, x_label=x_label, y_label=y_label, categories=levels)
        series = [
            Series(name, [(float(number), value) for number, value in enumerate(values)])
            for name, values in lines.items()
        ]
        return line_chart(axes, series)

    charts = [
        chart("Throughput", "output tokens/s", {"tokens/s": [result.output_tokens_per_s for result in results]}),
        chart("Time to first token", "ms", _percentile_lines([result.ttft for result in results])),
        chart("Inter-token gap", "ms", _percentile_lines([result.itl for result in results])),
        _trade_off(results, levels),
        chart(
            "Requests that kept the SLO",
            "%",
            {"good": [result.goodput.share * 100 if result.goodput else None for result in results]},
        ),
    ]
    warnings = [
        f'<p class="warning">{escape(result.label)}: {escape(warning)}</p>'
        for result in results
        for warning in result.warnings
    ]
    return ["<h2>Levels</h2>", *warnings, _table(SWEEP_TITLES, map(sweep_row, results)), _charts(charts)]


def _run_section(result: LoadResult, *, is_folded: bool) -> list[str]:
    """One run; folded up where there are several."""
    name = escape(result.label[:1].upper() + result.label[1:])
    parts = [f"<details><summary><h2>{name}</h2></summary>" if is_folded else f"<h2>{name}</h2>"]
    parts += [f'<p class="warning">{escape(warning)}</p>' for warning in result.warnings]
    parts += [_table(("", ""), total_rows(result), css="words"), _table(LATENCY_TITLES, latency_rows(result))]
    if result.errors:
        rows = [(error.code, error.reason, str(error.count), error.example) for error in result.errors]
        parts.append(_table(("code", "reason", "failures", "first message"), rows, css="words"))
    parts.append(_charts(_run_charts(result)))
    return [*parts, "</details>"] if is_folded else parts


def _run_charts(result: LoadResult) -> list[str]:
    bins, width_s = result.timeline, result.timeline_bin_s

    def over_time(title: str, y_label: str, lines: Mapping[str, Sequence[float | None]]) -> str:
        axes = Axes(title=title, x_label="seconds", y_label=y_label)
        series = [
            Series(name, [(one.start_s + width_s / 2, value) for one, value in zip(bins, values, strict=True)])
            for name, values in lines.items()
        ]
        return line_chart(axes, series)

    def rates(counts: Sequence[int]) -> list[float]:
        """Per second. Of the last slice only the part that the run has reached counts, but a quarter at least."""
        return [
            count / min(width_s, max(result.duration_s - one.start_s, width_s / 4))
            for one, count in zip(bins, counts, strict=True)
        ]

    return [
        _bars("Distribution of the time to first token", result.ttft_bars),
        _bars("Distribution of the inter-token gaps", result.itl_bars),
        over_time(
            "Inter-token gaps over time",
            "ms",
            {"p50": [_ms(one.gap_p50_s) for one in bins], "p99": [_ms(one.gap_p99_s) for one in bins]},
        ),
        over_time(
            "Throughput over time",
            "output tokens/s",
            {"tokens/s": rates([one.output_tokens for one in bins])},
        ),
        over_time("Requests in progress", "requests", {"in progress": [float(one.in_flight) for one in bins]}),
        over_time(
            "Requests that ended",
            "requests/s",
            {
                "finished": rates([one.finished for one in bins]),
                "failed": rates([one.failed for one in bins]),
            },
        ),
    ]


def _trade_off(results: Sequence[LoadResult], levels: Sequence[str]) -> str:
    """Throughput over the inter-token gap: each level a point."""
    points = [
        (result.itl.p50_s * 1000, result.output_tokens_per_s, level)
        for result, level in zip(results, levels, strict=True)
        if result.itl is not None
    ]
    axes = Axes(
        title="Throughput over latency", x_label="inter-token gap p50, ms", y_label="output tokens/s", from_zero=True
    )
    return line_chart(axes, [Series("levels", [(x, y) for x, y, _ in points], [level for _, _, level in points])])


# --- pieces ---------------------------------------------------------------------------------------


def _percentile_lines(distributions: Sequence[Distribution | None]) -> dict[str, list[float | None]]:
    return {
        "p50": [_ms(one.p50_s) if one else None for one in distributions],
        "p99": [_ms(one.p99_s) if one else None for one in distributions],
    }


def _bars(title: str, bars: Sequence[Bar]) -> str:
    """Bars in milliseconds. The last one, of all beyond the 99th percentile, is drawn as wide as the others."""
    if not bars:
        return ""
    step_s = bars[1].upper_s - bars[0].upper_s if len(bars) > 1 else bars[0].upper_s
    blocks = [
        Block(
            low=(bars[0].upper_s + (number - 1) * step_s) * 1000,
            high=(bars[0].upper_s + number * step_s) * 1000,
            value=bar.count,
        )
        for number, bar in enumerate(bars)
    ]
    return bar_chart(Axes(title=title, x_label="ms (last bar: that and above)", y_label="count"), blocks)


def _ratio_table(ratios: Sequence[Ratio]) -> str:
    rows = [
        (
            entry.label,
            entry.figure,
            human_seconds(entry.ours) if entry.unit == "s" else short(entry.ours),
            human_seconds(entry.theirs) if entry.unit == "s" else short(entry.theirs),
            f"{entry.ratio:.3f} x",
        )
        for entry in ratios
    ]
    return _table(("load", "figure", "here", "there", "ratio"), rows, css="pairs")


def _table(titles: Sequence[str], rows: Any, *, css: str = "") -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    top = f"<thead><tr>{head}</tr></thead>" if any(titles) else ""
    return f'<div class="wide"><table class="{css}">{top}<tbody>{body}</tbody></table></div>'


def _charts(charts: Sequence[str]) -> str:
    drawn = [chart for chart in charts if chart]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
