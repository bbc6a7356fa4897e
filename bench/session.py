"""Runs rows one after the other, each within its time, and writes what they found."""

from __future__ import annotations

import contextlib
import datetime
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from bench.engines.client import START_LIMIT_S, EngineFailed
from bench.engines.launch import Engines, available_threads, own_options
from bench.machine import LoadWatch, describe_machine
from bench.peers import PeerMissing, Peers
from bench.plots import write_plots
from bench.results import RowReport, RowResult, read_report, write_report
from bench.row import Context, Row
from bench.rows import ROW_NAMES, load_row
from bench.table import render
from bench.version import own_version
from twinstage.errors import TwinstageError


class RowTookTooLong(Exception):
    """A row did not end within its time."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run. `output` gets `results/`, `plots/` and `RESULTS.md`; `peers` is None without them.

    `patience` multiplies the limits of rows; `weights` are the precisions of our engine, None for the usual ones.
    """

    output: Path
    home: Path
    peers: Peers | None
    quick: bool
    rounds: int
    patience: float
    weights: Sequence[str] | None
    progress: Callable[[str], None]

    def run(self, names: Sequence[str]) -> list[RowReport]:
        """Measure some rows. One that fails is reported as failed; the others go on."""
        reports = []
        for name in names:
            row = load_row(name)
            self.progress(f"== {row.title}")
            reports.append(self._run_row(row))
            write_report(reports[-1], self.output / "results")
            self.render()
        return reports

    def render(self) -> Path:
        """Write plots and `RESULTS.md` from all JSON files that are there."""
        reports = [read_report(path) for path in map(self.result_path, ROW_NAMES) if path.exists()]
        for report in reports:
            if report.result is not None:
                write_plots(report.result.curves, self.output / "plots")
        page = self.output / "RESULTS.md"
        page.write_text(render(reports), encoding="utf-8")
        return page

    def result_path(self, name: str) -> Path:
        return self.output / "results" / f"{name}.json"

    def is_measured(self, name: str) -> bool:
        """Whether a row has a result already, so that a run that was interrupted need not begin again."""
        path = self.result_path(name)
        return path.exists() and read_report(path).result is not None

    def _run_row(self, row: Row) -> RowReport:
        version = own_version()  # now: the files may be edited while the row runs
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._prepare(row)
        watch, began_s = LoadWatch(), time.monotonic()
        result: RowResult | None = None
        error = ""
        try:
            result = self._measure(row)
        except (
            RowTookTooLong,
            EngineFailed,
            PeerMissing,
            TwinstageError,
            OSError,
            ArithmeticError,
            LookupError,
            ValueError,
        ) as why:
            error = f"{type(why).__name__}: {why}"
            self.progress(f"{row.name} failed: {error}")
        return RowReport(
            row=row.name,
            title=row.title,
            quick=self.quick,
            started=started,
            seconds=round(time.monotonic() - began_s, 1),
            machine=asdict(describe_machine()),
            load=watch.finish().to_dict(),
            versions={**(result.versions if result is not None else {}), "twinstage": version},
            result=result,
            error=error,
        )

    def _prepare(self, row: Row) -> None:
        """Start what takes so long that it shall not count as the row's time. The row finds out what is missing."""
        if self.peers is not None and row.needs_llama_server:
            with contextlib.suppress(PeerMissing):
                self.peers.llama(threads=available_threads())
        if self.peers is not None and row.needs_vllm:
            with contextlib.suppress(PeerMissing):
                self.peers.vllm()

    def _measure(self, row: Row) -> RowResult:
        logs = self.home / "logs" / row.name
        logs.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="bench") as directory,
            time_limit(self.patience * row.limit_s, what=row.name),
            Engines(
                peers=self.peers,
                log_directory=logs,
                progress=self.progress,
                own=own_options(self.weights),
                start_limit_s=self.patience * START_LIMIT_S,
            ) as engines,
        ):
            context = Context(
                quick=self.quick,
                rounds=self.rounds,
                peers=self.peers,
                engines=engines,
                directory=Path(directory),
                progress=self.progress,
            )
            return row.measure(context)


@contextmanager
def time_limit(limit_s: float, *, what: str) -> Iterator[None]:
    """Raise RowTookTooLong in the scope when it lasts longer. For the main thread."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise RowTookTooLong(f"{what} was ended after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
