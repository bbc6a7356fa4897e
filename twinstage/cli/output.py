"""What the command prints: answers on standard output, everything about them on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twinstage.client.results import ModelInfo, Ranking, Summary, WorkerInfo
from twinstage.types import Timing

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
_HIDDEN_KEYS = frozenset({"event", "level", "logger", "timestamp", "role", "exception"})
_WIDTH_OF_FILES = 200  # a table that goes into a file or a pipe is not cut to a terminal's width


def console_for_errors() -> Console:
    return Console(stderr=True, highlight=False)


def console_for_tables() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_FILES)


class LogPrinter:
    """Prints the lines of several processes, each with the process's name in a colour of its own.

    Events below `level` are left out; what is no log event (a traceback, a library's own output) is always printed.
    """

    def __init__(self, console: Console, *, level: str = "info") -> None:
        self._console = console
        self._lock = Lock()
        self._colours: dict[str, str] = {}
        self.level = level

    def __call__(self, name: str, line: str, event: dict[str, Any] | None) -> None:
        level = "" if event is None else str(event.get("level", "info"))
        if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
            return
        with self._lock:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            text = Text(f"{name:<10} ", style=colour)
            text.append(Text(line) if event is None else _event_text(event, level))
            self._console.print(text, soft_wrap=True)


def _event_text(event: dict[str, Any], level: str) -> Text:
    text = Text(style="default")
    if level != "info":
        text.append(f"{level}: ", style=_LEVEL_STYLES.get(level, "dim"))
    text.append(str(event["event"]))
    for key, value in event.items():
        if key not in _HIDDEN_KEYS and value != "":
            text.append(f" {key}=", style="dim")
            text.append(str(value))
    if "exception" in event:
        text.append(f"\n{event['exception']}")
    return text


def phases(timing: Timing) -> list[tuple[str, float]]:
    """Names and milliseconds of the phases of a request, in order."""
    seconds = (
        ("queue", timing.queue_s),
        ("tokenize", timing.tokenize_s),
        ("prefill", timing.prefill_s),
        ("kv transfer", timing.kv_transfer_s),
        ("time to first token", timing.time_to_first_token_s),
        ("decode", timing.decode_s),
        ("total", timing.total_s),
    )
    return [(name, value * 1000) for name, value in seconds]


def usage_line(summary: Summary, *, finish: str = "") -> str:
    """Tokens, and how fast the decode worker produced them."""
    usage, timing = summary.usage, summary.timing
    parts = [f"{usage.prompt_tokens} prompt tokens"]
    if usage.completion_tokens:
        parts.append(f"{usage.completion_tokens} completion tokens")
    if usage.cached_prompt_tokens:
        parts.append(f"{usage.cached_prompt_tokens} from the cache")
    if timing.decode_s > 0 and usage.completion_tokens > 1:
        parts.append(f"{(usage.completion_tokens - 1) / timing.decode_s:.1f} tokens/s")
    if finish:
        parts.append(f"finished by {finish}")
    return " · ".join(parts)


def timing_line(timing: Timing) -> str:
    """The phases that took time; an embedding, for one, has no decode."""
    return " · ".join(f"{name} {milliseconds:.1f} ms" for name, milliseconds in phases(timing) if milliseconds > 0)


def placement_line(summary: Summary) -> str:
    """Which workers served a request, and what moved between them."""
    placement = summary.placement
    text = placement.prefill_worker
    if placement.decode_worker:
        moved = f"{human_bytes(placement.kv_bytes)} of KV by {placement.transport or 'no transport'}"
        text += f" -> {placement.decode_worker}, {moved}"
    if placement.retries:
        text += f", {placement.retries} retries"
    return text


def human_bytes(count: int) -> str:
    """A number of bytes for people: 5.2 MiB."""
    value, units = float(count), ("bytes", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if value < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {units[-1]}"


def state_of(worker: WorkerInfo) -> str:
    """The state of a worker, with what a draining one has left."""
    if worker.state != "draining":
        return worker.state
    return f"draining, {worker.unfinished} left" if worker.unfinished else "drained"


def _kv_blocks(worker: WorkerInfo) -> str:
    free = f"{worker.free_kv_blocks}/{worker.total_kv_blocks}"
    return f"{free}, {worker.leaked_kv_blocks} leaked" if worker.leaked_kv_blocks else free


def workers_table(workers: Iterable[WorkerInfo]) -> Table:
    numbers = ("kv blocks free", "prefix hits", "running", "waiting", "finished", "kv received")
    table = _table(("worker", "role", "state", "model", "address"), numbers, ("transports", "detail"))
    for worker in workers:
        table.add_row(
            worker.worker_id or "?",
            worker.role.value if worker.role is not None else "?",
            state_of(worker),
            worker.model,
            worker.address,
            _kv_blocks(worker),
            f"{worker.prefix_found_blocks / worker.prefix_looked_up_blocks:.0%}"
            if worker.prefix_looked_up_blocks
            else "",
            str(worker.running),
            str(worker.waiting),
            str(worker.finished),
            human_bytes(worker.kv_bytes_received),
            " ".join(worker.transports),
            worker.detail,
        )
    return table


def models_table(models: Iterable[ModelInfo]) -> Table:
    numbers = ("context", "vocabulary", "dimensions", "prefill workers", "decode workers")
    table = _table(("model", "task", "ready"), numbers, ("fingerprint",))
    for model in models:
        table.add_row(
            model.name,
            model.task.value if model.task is not None else "?",
            "yes" if model.ready else "no",
            str(model.max_model_len),
            str(model.vocab_size),
            str(model.embedding_dimensions or ""),
            str(model.prefill_workers),
            str(model.decode_workers),
            model.fingerprint[:12],
        )
    return table


def ranking_table(ranking: Ranking, documents: Sequence[str]) -> Table:
    """Documents, the best first, with their places in the order in which they were given."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("rank", "score", "place"):
        table.add_column(title, justify="right")
    table.add_column("document", overflow="fold")
    for rank, entry in enumerate(ranking.documents, 1):
        table.add_row(str(rank), f"{entry.score:.4f}", str(entry.index + 1), Text(documents[entry.index]))
    return table


def _table(texts: Sequence[str], numbers: Sequence[str], more_texts: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in texts:
        table.add_column(title, overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right")
    for title in more_texts:
        table.add_column(title, overflow="fold")
    return table
