"""What `twinstage bench` shows: progress on standard error while it runs, tables when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinstage.bench.compare import Ratio
from twinstage.bench.figures import LATENCY_TITLES, SWEEP_TITLES, human_seconds, latency_rows, sweep_row, total_rows
from twinstage.bench.options import LoadOptions
from twinstage.bench.plan import number_of_requests
from twinstage.bench.results import LoadResult
from twinstage.bench.summary import Snapshot
from twinstage.bench.svg import short
from twinstage.cli.output import console_for_errors

PLAIN_LINE_S = 5.0  # between two lines where there is no terminal


class Progress:
    """A bar and a line of figures on a terminal, a line now and then elsewhere, nothing when quiet."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._console = console or console_for_errors()
        self._quiet = quiet
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", style="bold"),
            rich_progress.BarColumn(bar_width=20),
            rich_progress.TextColumn("{task.fields[line]}"),
            console=self._console,
            auto_refresh=False,  # the event loop refreshes it, so that no thread takes time from it
            disable=quiet or not self._console.is_terminal,
        )
        self._task: rich_progress.TaskID | None = None
        self._label = ""
        self._options: LoadOptions | None = None
        self._last: Snapshot | None = None
        self._printed_s = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, options: LoadOptions, number: int, total: int) -> None:
        """A level begins: first its warm-up, then what is measured."""
        self._options, self._last, self._printed_s = options, None, 0.0
        self._label = options.label if total == 1 else f"{number}/{total} {options.label}"
        if self._is_live:
            self._task = self._bar.add_task(
                self._label, total=options.duration_s or number_of_requests(options), line="connecting, warming up"
            )
            self._bar.refresh()

    def show(self, now: Snapshot) -> None:
        """The run has come so far."""
        line = progress_line(now, self._last)
        self._last = now
        if self._is_live and self._task is not None and self._options is not None:
            done = now.elapsed_s if self._options.duration_s is not None else now.succeeded + now.failed
            self._bar.update(self._task, completed=done, line=line)
            self._bar.refresh()
        elif not self._quiet and now.elapsed_s - self._printed_s >= PLAIN_LINE_S:
            self._printed_s = now.elapsed_s
            self._console.print(f"{self._label}: {line}", soft_wrap=True, markup=False)

    @property
    def _is_live(self) -> bool:
        return not self._bar.disable


def progress_line(now: Snapshot, before: Snapshot | None) -> str:
    """One line of figures; the throughput is that since `before`."""
    since_s = now.elapsed_s - (before.elapsed_s if before else 0.0)
    tokens = now.output_tokens - (before.output_tokens if before else 0)
    parts = [
        f"{now.elapsed_s:.0f} s",
        f"{now.in_flight} running",
        f"{now.succeeded} done",
        f"{now.failed} failed",
        f"{tokens / since_s if since_s > 0 else 0:.0f} tokens/s",
    ]
    if now.ttft_p50_s is not None:
        parts.append(f"TTFT {human_seconds(now.ttft_p50_s)} (p99 {human_seconds(now.ttft_p99_s)})")
    if now.itl_p50_s is not None:
        parts.append(f"inter-token {human_seconds(now.itl_p50_s)} (p99 {human_seconds(now.itl_p99_s)})")
    return " · ".join(parts)


def print_results(console: Console, results: Sequence[LoadResult]) -> None:
    """One run in full, or a line for each of several; then what went wrong and what to be careful with."""
    if len(results) == 1:
        console.print(_table(("", ""), total_rows(results[0]), texts=2))
        console.print()
        console.print(_table(LATENCY_TITLES, latency_rows(results[0])))
    else:
        console.print(_table(SWEEP_TITLES, map(sweep_row, results)))
    for result in results:
        for error in result.errors:
            kind = " ".join(part for part in (error.code, error.reason) if part)
            line = f"{result.label}: {error.count} x {kind}: {error.example}"
            console.print(Text(line, style="red"), soft_wrap=True)
        for warning in result.warnings:
            console.print(Text(f"{result.label}: {warning}", style="yellow"), soft_wrap=True)


def print_ratios(console: Console, ratios: Sequence[Ratio]) -> None:
    """Each figure here and there, and how many times there it is here."""
    rows = [
        (
            entry.label,
            entry.figure,
            human_seconds(entry.ours) if entry.unit == "s" else short(entry.ours),
            human_seconds(entry.theirs) if entry.unit == "s" else short(entry.theirs),
            Text(f"{entry.ratio:.3f} x", style="green" if entry.is_better else "red"),
        )
        for entry in ratios
    ]
    console.print()
    console.print(_table(("load", "figure", "here", "there", "ratio"), rows, texts=2))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str | Text]], *, texts: int = 1) -> Table:
    """The first `texts` columns are words, the others numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False, show_header=any(titles))
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
