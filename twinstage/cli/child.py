"""One process of a local cluster: starting it, reading its log, ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from twinstage.errors import ConfigError
from twinstage.telemetry.process import EXIT_WITH_PARENT

TAIL_LINES = 20


class Child:
    """A role's process. Its log is read on a thread, which calls back.

    The process sits in a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone, which then
    ends its children in order. Should the launcher be killed, the kernel ends the child: it is told so by the
    environment (`TWINSTAGE_EXIT_WITH_PARENT`). That holds for the thread that starts it, which must live as long.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        ready_event: str,
        environment: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        niceness: int = 0,
    ) -> None:
        """`environment` comes on top of this process's own, from which the variables `without` are left out.

        `niceness` is added to that of this process: with more of it, others have the CPUs first.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        self.name = name
        self._ready_event = ready_event
        self.address = ""  # "host:port", once the process says that it is ready
        self.exit_code: int | None = None  # negative: the number of the signal that killed it
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)  # the last lines that are no log events
        self._process = subprocess.Popen(
            # -P: a directory named `router` where the command was called must not be taken for ours.
            [sys.executable, "-P", "-m", module, *arguments, "--log-format", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**inherited, "PYTHONUNBUFFERED": "1", **(environment or {}), EXIT_WITH_PARENT: "1"},
            process_group=0,
        )
        if niceness:  # it has one thread yet, which those that it starts take after
            os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        self._reader: Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def read_log(
        self,
        *,
        log_path: Path | None,
        on_line: Callable[[Child, str, dict[str, Any] | None], None],
        on_ready: Callable[[Child], None],
        on_exit: Callable[[Child], None],
    ) -> None:
        """Start reading. `on_line` gets each line, and the event in it where it is one; `on_exit` comes last, once.

        Raises ConfigError when the file cannot be written.
        """
        try:
            log_file = open(log_path or os.devnull, "ab")  # noqa: SIM115 - the thread closes it
        except OSError as error:
            raise ConfigError(f"--log-directory: cannot write {log_path}: {error.strerror}") from error

        def read() -> None:
            stdout = self._process.stdout
            assert stdout is not None
            with log_file as log:
                for raw in stdout:
                    log.write(raw)
                    log.flush()
                    line = raw.decode(errors="replace").rstrip("\n")
                    event = _event_of(line)
                    if event is None:
                        self.tail.append(line)
                    on_line(self, line, event)
                    if event is not None and event["event"] == self._ready_event and not self.address:
                        self.address = str(event.get("address", ""))
                        on_ready(self)
            stdout.close()
            self.exit_code = self._process.wait()
            on_exit(self)

        self._reader = Thread(target=read, name=f"log of {self.name}", daemon=True)
        self._reader.start()

    def send(self, signal_number: int) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if self.is_running:
            self._process.send_signal(signal_number)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the process; whether it came in time."""
        if self._reader is None:
            try:
                self.exit_code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def end_in_words(self) -> str:
        """How the process ended, with its last words."""
        if self.exit_code is not None and self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"ended with exit code {self.exit_code}"
        last = next((line.strip() for line in reversed(self.tail) if line.strip()), "")
        return f"{self.name} {how}" + (f": {last}" if last else "")


def _event_of(line: str) -> dict[str, Any] | None:
    """The log event in a line; None when the line is something else (a traceback, a library's own output)."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
