"""Our side of the pipe to an engine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pausing import pause_group, resume_group

START_LIMIT_S = 180.0
_TAIL_BYTES = 2000
_END_S = 5.0


class EngineFailed(Exception):
    """An engine did not start, ended, took too long or reported an error."""


class EngineProcess:
    """An engine's process, ready when this is made. Raises EngineFailed, then and later.

    What it prints goes to `log_path`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        start_timeout_s: float = START_LIMIT_S,
    ) -> None:
        self._log_path = log_path
        self._buffer = b""
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                process_group=0,
            )
        try:
            self._read(start_timeout_s)
            description = self.call("describe")
        except BaseException:
            self.close()
            raise
        self.name: str = description["name"]
        self.versions: dict[str, str] = description["versions"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, command: str, *, timeout_s: float = 600.0, **arguments: Any) -> dict[str, Any]:
        """Have a command done and return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(f"the engine has ended: {self._tail()}") from error
        return self._read(timeout_s)

    def prefill(self, tokens: int) -> float:
        """Seconds from a new prompt to its first token."""
        return float(self.call("prefill", tokens=tokens)["seconds"])

    def decode(self, *, batch: int, context: int, steps: int) -> float:
        """Seconds for `steps` steps of `batch` sequences that begin with `context` tokens."""
        return float(self.call("decode", batch=batch, context=context, steps=steps)["seconds"])

    def pause(self) -> None:
        """Stop the process until `resume`; it answers nothing meanwhile."""
        pause_group(self._process.pid)

    def resume(self) -> None:
        resume_group(self._process.pid)

    def close(self) -> None:
        """End the process. Idempotent."""
        self.resume()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next answer."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise EngineFailed(f"no answer within {timeout_s:.0f} s: {self._tail()}")
                data = os.read(stdout.fileno(), 65536)
                if not data:
                    raise EngineFailed(f"the engine has ended: {self._tail()}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _tail(self) -> str:
        text = self._log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return text or "it printed nothing"
