"""What `twinstage bench` does: run, show, write files, and tell by its exit code how it went."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twinstage.bench.compare import Ratio, compare
from twinstage.bench.document import document, plain, read_document
from twinstage.bench.html_report import html_report
from twinstage.bench.options import LoadOptions
from twinstage.bench.results import LoadResult, RequestRecord
from twinstage.bench.sweep import run_sweep
from twinstage.cli.bench_display import Progress, print_ratios, print_results
from twinstage.cli.bench_flags import OutputFlags
from twinstage.cli.output import console_for_errors, console_for_tables
from twinstage.errors import Cancelled, ConfigError, TwinstageError
from twinstage.rpc.access import OPEN_ACCESS, Access

INTERRUPTED = 128 + signal.SIGINT
_STANDARD_OUTPUT = Path("-")


class Records:
    """Writes a JSON line for each request as it ends. Raises ConfigError when the file cannot be written."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = open(path or os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - closed with the scope
        except OSError as error:
            raise ConfigError(f"--records: cannot write {path}: {error.strerror}") from error
        self.label = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, record: RequestRecord) -> None:
        json.dump({"load": self.label, **plain(dataclasses.asdict(record))}, self._file)
        self._file.write("\n")


def run(
    options: LoadOptions,
    *,
    outputs: OutputFlags,
    concurrencies: Sequence[int],
    rates: Sequence[float],
    access: Access = OPEN_ACCESS,
) -> int:
    """Run the load and return the exit code. Raises TwinstageError, after what was measured before is shown."""
    _check_outputs(outputs)
    other = read_document(outputs.compare) if outputs.compare is not None else None
    results: list[LoadResult] = []
    problem: TwinstageError | None = None
    try:
        with Records(outputs.records) as records:
            levels = (concurrencies, rates)
            asyncio.run(_load(options, results, access=access, outputs=outputs, records=records, levels=levels))
    except TwinstageError as error:
        problem = error
    if results:
        found = document(options, results)
        ratios: list[Ratio] = []
        try:
            ratios = compare(found, other) if other is not None else []
        except ConfigError as error:
            problem = problem or error
        _print(results, ratios, to_errors=outputs.json_file == _STANDARD_OUTPUT)
        _write(found, results, ratios, outputs)
    if problem is not None and not isinstance(problem, Cancelled):
        raise problem
    return INTERRUPTED if problem is not None else _exit_code(results, fail_on_error=outputs.fail_on_error)


async def _load(
    options: LoadOptions,
    results: list[LoadResult],
    *,
    access: Access,
    outputs: OutputFlags,
    records: Records,
    levels: tuple[Sequence[int], Sequence[float]],
) -> None:
    """Add to `results` as levels end, so that an error at a later one does not take the earlier ones away."""
    stop = asyncio.Event()
    concurrencies, rates = levels
    with _stopped_by_signals(stop), Progress(quiet=outputs.quiet) as progress:

        def begin(level: LoadOptions, number: int, total: int) -> None:
            progress.begin(level, number, total)
            records.label = level.label

        await run_sweep(
            options,
            concurrencies=concurrencies,
            rates=rates,
            access=access,
            on_level=begin,
            on_result=results.append,
            on_progress=progress.show,
            on_request=records.add if outputs.records is not None else None,
            stop=stop,
        )


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the run in order, with its results; another one ends the process at once."""
    loop = asyncio.get_running_loop()

    def act(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _files(outputs: OutputFlags) -> tuple[tuple[str, Path | None], ...]:
    return (("--json", outputs.json_file), ("--html", outputs.html_file), ("--records", outputs.records))


def _check_outputs(outputs: OutputFlags) -> None:
    """Before anything is measured: a result that cannot be written would be lost."""
    for flag, path in _files(outputs):
        if path is None or (flag == "--json" and path == _STANDARD_OUTPUT):
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{flag}: cannot write {path}; name a file in a folder that exists and may be written")


def _print(results: Sequence[LoadResult], ratios: Sequence[Ratio], *, to_errors: bool) -> None:
    console = console_for_errors() if to_errors else console_for_tables()
    print_results(console, results)
    if ratios:
        print_ratios(console, ratios)


def _write(found: dict[str, Any], results: Sequence[LoadResult], ratios: Sequence[Ratio], outputs: OutputFlags) -> None:
    if outputs.json_file == _STANDARD_OUTPUT:
        json.dump(found, sys.stdout, ensure_ascii=False)
        print()
    elif outputs.json_file is not None:
        outputs.json_file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if outputs.html_file is not None:
        outputs.html_file.write_text(html_report(found, results, ratios), encoding="utf-8")


def _exit_code(results: Sequence[LoadResult], *, fail_on_error: bool) -> int:
    if any(result.interrupted for result in results):
        return INTERRUPTED
    failed = sum(result.requests.failed for result in results)
    succeeded = sum(result.requests.succeeded for result in results)
    return int(bool(failed) and (fail_on_error or not succeeded))
