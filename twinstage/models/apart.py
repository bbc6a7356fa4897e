"""What a first start makes, made in a process of its own: its memory and its imports end with it.

Converting, packing, compiling and trying a model takes hundreds of megabytes, of which a process that lives on keeps
most: libraries stay, and so do the pages between what is still in use. So a worker has another process fill the cache,
and reads what is there. A process that has torch already is spared nothing by that and does it itself.

The child says on its standard output, a JSON object a line, what takes time, what it logs, and how it failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from twinstage.errors import ConfigError, ModelError, NotFusible
from twinstage.telemetry.children import command_of, module_path
from twinstage.telemetry.log import get_logger
from twinstage.telemetry.process import EXIT_WITH_PARENT

_CHILD = "twinstage.models.apart_child"
_ERRORS = {kind.__name__: kind for kind in (ModelError, NotFusible, ConfigError)}
_LEVELS = ("debug", "info", "warning", "error")

logger = get_logger(__name__)


def is_worth_it() -> bool:
    """Whether this process has been spared torch so far."""
    return "torch" not in sys.modules


def make_apart(task: str, arguments: Mapping[str, Any], *, what: str, progress: Callable[[str], None]) -> None:
    """Run one of the tasks of `apart_child` with JSON values as arguments, and return when it is done.

    `what` names it in errors. The child ends with this process, whatever ends it. Raises ModelError, NotFusible and
    ConfigError as the task does, and ModelError when the child ends without a word.
    """
    environment = os.environ | module_path() | {EXIT_WITH_PARENT: "1"}
    command = command_of(_CHILD, task, str(os.getpid()))
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:  # how it ended is seen below
                json.dump(dict(arguments), child.stdin)
            assert child.stdout is not None
            failure = None
            for line in child.stdout:
                failure = _heard(json.loads(line), progress) or failure
        except BaseException:
            child.kill()
            raise
    if failure is not None:
        raise failure
    if child.returncode:
        raise ModelError(f"{what}: the process that does it {_ending(child.returncode)}")


def _heard(message: Mapping[str, Any], progress: Callable[[str], None]) -> ModelError | ConfigError | None:
    """Pass on what the child says; its failure, if it is one."""
    if "progress" in message:
        progress(message["progress"])
    elif "log" in message:
        level, event = message.get("level"), message["log"]
        log = getattr(logger, level) if level in _LEVELS else logger.info
        log(event, **message.get("values", {}))
    elif "error" in message:
        return _ERRORS.get(message["error"], ModelError)(message["message"])
    return None


def _ending(exit_code: int) -> str:
    if exit_code > 0:
        return f"ended with exit code {exit_code}; what it said is above"
    number = -exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the kernel does so when memory is short" if number == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
