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
from typing import TYPE_CHECKING, Self

from bench.pausing import pause_group, resume_group
from bench.peers.install import PeerMissing

if TYPE_CHECKING:
    from bench.peers import Peers

LLAMA_READY_S = 60.0
VLLM_READY_S = 900.0  # compiling takes most of it, the first time
_END_S = 20.0
_POLL_S = 0.02
_TAIL_BYTES = 1500
MODEL = "demo"  # the name that requests use


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


def llama_server(peers: Peers, *, slots: int, context_tokens: int, threads: int) -> ServerCommand:
    """llama.cpp's own server with room for `slots` requests of `context_tokens` tokens. Raises PeerMissing."""
    port = _free_port()
    binary = peers.python("llama").with_name("llama-server")
    if not binary.exists():
        raise PeerMissing(f"llama.cpp's server is not at {binary}")
    command = [str(binary), "--model", str(peers.q8_0_model()), "--alias", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context_tokens), "--no-webui"]
    return ServerCommand(
        name="llama.cpp server Q8_0",
        command=command,
        environment={},
        port=port,
        ready_path="/health",
        ready_limit_s=LLAMA_READY_S,
        log_path=peers.log_path("llama-server"),
    )


def vllm_server(peers: Peers, model_directory: Path, *, dtype: str) -> ServerCommand:
    """`vllm serve`, with all cores for computing (it would keep one free, which is half of two). Raises PeerMissing.

    `dtype`: float32, or bfloat16 where the CPU multiplies such numbers.
    """
    port = _free_port()
    command = [str(peers.python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_directory), "--served-model-name", MODEL, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", "--max-num-seqs", "32"]
    command += ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    return ServerCommand(
        name=f"vLLM CPU {dtype}",
        command=command,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(peers.home / "vllm-cache"),
            "LD_PRELOAD": ":".join(map(str, _preloaded(peers.directory / "vllm"))),
        },
        port=port,
        ready_path="/health",
        ready_limit_s=VLLM_READY_S,
        log_path=peers.log_path("vllm-server"),
    )


def _preloaded(environment: Path) -> list[Path]:
    """What the documentation of vLLM says to preload, where it is: OpenMP from its environment, and tcmalloc."""
    candidates = [
        environment / "lib" / "libiomp5.so",
        *sorted(Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4")),
    ]
    return [path for path in candidates if path.exists()]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _tail(path: Path) -> str:
    return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip() or "it printed nothing"
