"""The process that `apart` starts: `python -m twinstage.models.apart_child TASK PARENT`, with JSON on its input."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

import structlog

from twinstage.errors import TwinstageError
from twinstage.telemetry.process import exit_with_parent_if_asked

Say = Callable[..., None]


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the middle of a compiler, which Python cannot interrupt
        signal.signal(number, signal.SIG_DFL)
    exit_with_parent_if_asked()
    if os.getppid() != int(sys.argv[2]):  # it ended before this one could ask for a signal
        return 1
    say = _channel()
    _log_through(say)
    task, arguments = TASKS[sys.argv[1]], json.load(sys.stdin)
    try:
        task(arguments, lambda message: say(progress=message))
    except TwinstageError as error:
        say(error=type(error).__name__, message=str(error))
        return 1
    return 0


def _channel() -> Say:
    """Writes messages to what was standard output; what libraries print there goes to standard error."""
    output: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**message: Any) -> None:
        output.write(json.dumps(message, default=str) + "\n")
        output.flush()

    return say


def _log_through(say: Say) -> None:
    """The parent logs, as it knows how."""

    def send(_logger: Any, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        say(log=event.pop("event"), level=level, values=dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[send])


def _convert_gguf(arguments: Mapping[str, Any], progress: Callable[[str], None]) -> None:
    from twinstage.models.convert_gguf import convert_gguf

    convert_gguf(Path(arguments["path"]), Path(arguments["directory"]), progress=progress)


def _load_fused(arguments: Mapping[str, Any], progress: Callable[[str], None]) -> None:
    """Load a model, which fills the cache."""
    import torch  # noqa: F401  # so that it is made here

    from twinstage.models.fused.load import load_fused
    from twinstage.models.resolve import ResolvedModel
    from twinstage.types import Task

    resolved = ResolvedModel(
        directory=Path(arguments["directory"]),
        name=arguments["name"],
        fingerprint=arguments["fingerprint"],
        task=Task.GENERATE,
    )
    load_fused(
        resolved,
        precision=arguments["precision"],
        kv_dtype=arguments["kv_dtype"],
        threads=arguments["threads"],
        cache_directory=Path(arguments["cache_directory"]),
        progress=progress,
    ).close()


TASKS: Mapping[str, Callable[[Mapping[str, Any], Callable[[str], None]], None]] = {
    "convert_gguf": _convert_gguf,
    "load_fused": _load_fused,
}

if __name__ == "__main__":
    sys.exit(main())
