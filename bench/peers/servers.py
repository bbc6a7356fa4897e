"""The peers' servers, speaking OpenAI's protocol on a loopback port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.pausing import pause_group, resume_group
from bench.peers.install import PeerMissing

_END_S = 20.0
_POLL_S = 0.02
_TAIL_BYTES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started. `ready_path` answers 200 once it serves."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    ready_path: str
    ready_limit_s: float
    log_path: Path


class PeerServer:
    """A server that is ready, `ready_s` after it was started. Raises PeerMissing when it does not get there."""

    def __init__(self, how: ServerCommand) -> None:
        self.name = how.name
        self.address = f"http://127.0.0.1:{how.port}"
        started_s = time.monotonic()
        with how.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                how.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **how.environment},
                start_new_session=True,
            )
        try:
            self._wait_ready(how, started_s + how.ready_limit_s)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started_s

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stop the server and its processes until `resume`."""
        pause_group(self._process.pid)

    def resume(self) -> None:
        resume_group(self._process.pid)

    def close(self) -> None:
        """End the server and the processes that it started. Idempotent."""
        self.resume()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_ready(self, how: ServerCommand, deadline_s: float) -> None:
        while not _answers(self.address + how.ready_path):
            if self._process.poll() is not None:
                raise PeerMissing(f"{how.name} ended with {self._process.returncode}: {_tail(how.log_path)}")
            if time.monotonic() > deadline_s:
                raise PeerMissing(f"{how.name} was not ready within {how.ready_limit_s:.0f} s: {_tail(how.log_path)}")
            time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() or "it printed nothing"
