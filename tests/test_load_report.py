"""What becomes of load results: the JSON document, comparisons, charts, the HTML report, the progress display."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from twinstage.bench.compare import compare
from twinstage.bench.document import document, read_document
from twinstage.bench.figures import human_seconds
from twinstage.bench.html_report import html_report
from twinstage.bench.measure import Books
from twinstage.bench.options import LoadOptions, Slo, TraceOptions
from twinstage.bench.results import GeneratorHealth, LoadResult
from twinstage.bench.summary import snapshot, summarize
from twinstage.bench.svg import Axes, Block, Series, bar_chart, line_chart, short, ticks
from twinstage.bench.target import Answer, RequestFailed
from twinstage.cli.bench_display import Progress, print_ratios, print_results
from twinstage.errors import ConfigError

HOSTILE = "<script>alert('x')</script>&\"[bold]"
OPTIONS = LoadOptions(addresses=("a:1",), concurrency=2, slo=Slo(ttft_s=1.0))


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_books(*, gap_s: float = 0.01, requests: int = 5) -> Books:
    """Requests of four tokens each, one after the other, and one that failed in a hostile manner."""
    clock = _Clock()
    books = Books(clock=clock, slo=OPTIONS.slo, start_s=0.0)
    for number in range(requests):
        track = books.begin(scheduled_s=clock.now_s, prompt_tokens=7)
        clock.now_s += 0.1 + number / 100
        for _ in range(4):
            track.tokens(1)
            clock.now_s += gap_s
        books.succeed(track, Answer(prompt_tokens=7, output_tokens=4, kv_bytes=2**20, phases_s={HOSTILE: 0.01}))
    books.fail(books.begin(scheduled_s=clock.now_s, prompt_tokens=7), RequestFailed(HOSTILE, code="INTERNAL"))
    return books


def make_result(options: LoadOptions = OPTIONS, *, gap_s: float = 0.01) -> LoadResult:
    result = summarize(
        make_books(gap_s=gap_s),
        options=options,
        model=HOSTILE,
        prompt_seed=1,
        started_at=0.0,
        interrupted=False,
        health=GeneratorHealth(loop_share=0.1, cpu_share=0.1, loop_lag=None, start_delay=None),
    )
    return replace(result, warnings=(HOSTILE,))


# --- documents and comparisons --------------------------------------------------------------------


def test_a_document_is_read_back_as_it_was(tmp_path: Path) -> None:
    options = replace(OPTIONS, trace=TraceOptions(path=Path("t.jsonl")))
    made = document(options, [make_result()])
    path = tmp_path / "result.json"
    path.write_text(json.dumps(made))
    assert read_document(path) == made
    assert made["options"]["protocol"] == "twinstage"
    assert made["options"]["trace"]["path"] == "t.jsonl"
    assert made["runs"][0]["requests"]["succeeded"] == 5
    assert made["runs"][0]["ttft"]["max_s"] == pytest.approx(0.14)


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other", "runs": []}', '{"format": "twinstage-bench/1"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_document(path)


def test_ratios_of_single_runs() -> None:
    slow = document(OPTIONS, [make_result(gap_s=0.02)])
    fast = document(replace(OPTIONS, concurrency=9), [make_result(replace(OPTIONS, concurrency=9))])
    ratios = {entry.figure: entry for entry in compare(fast, slow)}
    gap = ratios["inter-token gap, p50"]
    assert (gap.label, gap.is_better, gap.ratio) == (
        "concurrency 9 / concurrency 2",
        True,
        pytest.approx(0.5, rel=0.01),
    )
    throughput = ratios["output tokens/s"]
    assert throughput.is_better
    assert throughput.ratio == pytest.approx(throughput.ours / throughput.theirs)
    assert not {entry.figure: entry for entry in compare(slow, fast)}["output tokens/s"].is_better


def test_levels_of_sweeps_are_matched_by_load() -> None:
    def sweep(*levels: int) -> dict[str, object]:
        return document(OPTIONS, [make_result(replace(OPTIONS, concurrency=level)) for level in levels])

    ratios = compare(sweep(1, 2, 4), sweep(2, 4, 8))
    assert {entry.label for entry in ratios} == {"concurrency 2", "concurrency 4"}
    assert {round(entry.ratio, 9) for entry in ratios} == {1}
    with pytest.raises(ConfigError, match="there: concurrency 4, concurrency 8"):
        compare(sweep(1, 2), sweep(4, 8))


# --- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3, 11, [4, 6, 8, 10]),
        (0, 2300, [0, 500, 1000, 1500, 2000]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.00456, "0.00456"), (100, "100"), (2.0, "2")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 us"),
        (0.0000042, "4.20 us"),
        (0.00074, "740 us"),
        (0.0312, "31.2 ms"),
        (0.9996, "1.00 s"),
        (75.0, "75.00 s"),
    ],
)
def test_durations_in_words(seconds: float | None, text: str) -> None:
    assert human_seconds(seconds) == text


def test_a_line_is_interrupted_where_there_is_no_value() -> None:
    axes = Axes(title=HOSTILE, x_label="x", y_label="y")
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0)]
    chart = ElementTree.fromstring(line_chart(axes, [Series("a", points), Series(HOSTILE, points)]))
    path = chart.find("path[@class='line s0']")
    assert path is not None
    assert re.sub(r"[\d. ]", "", path.attrib["d"]) == "MLM"
    assert chart.attrib["aria-label"] == HOSTILE
    assert HOSTILE in [text.text for text in chart.iter("text")]
    assert line_chart(axes, [Series("a", [(0.0, None)])]) == ""


def test_bars_are_as_high_as_their_values() -> None:
    axes = Axes(title="t", x_label="x", y_label="y")
    chart = ElementTree.fromstring(bar_chart(axes, [Block(0, 1, 4), Block(1, 2, 1), Block(2, 3, 0)]))
    heights = [float(bar.attrib["height"]) for bar in chart.iter("rect")]
    assert heights[0] == pytest.approx(4 * heights[1], rel=0.01)
    assert heights[2] == 0
    assert bar_chart(axes, []) == ""


# --- the report -----------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Collects tags, attributes that refer to something, and text; raises on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [f"{name}={value}" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("levels", [(2,), (1, 2, 4)])
def test_the_report_is_one_whole_page_in_which_nothing_is_markup_but_its_own(levels: tuple[int, ...]) -> None:
    results = [make_result(replace(OPTIONS, concurrency=level)) for level in levels]
    found = document(replace(OPTIONS, addresses=(HOSTILE,)), results)
    html = html_report(found, results, compare(found, found))
    page = _Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert "script" not in page.tags
    assert page.references == []
    assert "url(" not in html
    assert "@import" not in html
    assert page.tags.count("svg") == 6 * len(levels) + (5 if len(levels) > 1 else 0)
    text = "".join(page.text)
    assert f"Load test of {HOSTILE}" in text
    assert f"server: {HOSTILE}" in text
    assert "prefers-color-scheme:dark" in text
    for title in ("Distribution of the time to first token", "Inter-token gaps over time", "Throughput over time"):
        assert text.count(title) == len(levels)


# --- the terminal ---------------------------------------------------------------------------------


def shown(results: list[LoadResult]) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_results(console, results)
    found = document(OPTIONS, results)
    print_ratios(console, compare(found, found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_of_one_run_and_of_a_sweep() -> None:
    one = shown([make_result()])
    assert re.search(r"requests +6 sent, 5 succeeded, 1 failed", one)
    assert re.search(r"tokens +35 in, 20 out in 20 messages", one)
    assert re.search(r"KV moved +5\.0 MiB", one)
    assert re.search(r"goodput .*5 kept the SLO \(83\.3%\)", one)
    assert re.search(r"time to first token +120 ms +120 ms +140 ms +140 ms +140 ms +140 ms", one)
    assert f"1 x INTERNAL: {HOSTILE}" in one
    assert re.search(r"inter-token gap, p50 +10\.0 ms +10\.0 ms +1\.000 x", one)
    sweep = shown([make_result(), make_result(replace(OPTIONS, concurrency=4))])
    assert re.search(r"concurrency 2 +5 +1 .*120 ms +140 ms +10\.0 ms", sweep)
    assert re.search(r"concurrency 4 +5 +1 ", sweep)


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "expected"),
    [(True, False, "2/3 concurrency 2"), (False, False, "2/3 concurrency 2: 7 s"), (False, True, "")],
)
def test_progress(is_terminal: bool, quiet: bool, expected: str) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal, color_system=None)
    now = replace(snapshot(make_books()), elapsed_s=7.0)
    with Progress(quiet=quiet, console=console) as progress:
        progress.begin(OPTIONS, 2, 3)
        progress.show(replace(now, elapsed_s=1.0, output_tokens=8))
        progress.show(now)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert expected in output
    assert bool(output) is not quiet
    if not quiet:
        assert "5 done · 1 failed · 2 tokens/s · TTFT 120 ms (p99 140 ms) · inter-token 10.0 ms" in output
