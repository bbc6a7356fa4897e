"""Clusters of real processes for tests: each role is started as a user would start it, on ports that the system picks.

    with ProcessCluster(tmp_path) as cluster:
        cluster.start_workers(model, prefill=2, decode=3)
        cluster.start_router()
        stub = GenerationServiceStub(grpc.insecure_channel(cluster.address))

Every process is watched through its own log, which a failing test shows. Leaving the scope ends what was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from twinstage.v1 import admin_pb2, admin_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0  # importing torch on a busy machine takes its time
POLL_S = 0.02


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Return as soon as `condition` holds. Raises AssertionError naming `what` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """A port that was free a moment ago, for the rare case in which it must be known before its server starts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class RoleProcess:
    """One process of a cluster."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_event: str
    address: str = ""
    told_to_stop: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON events that the process has logged so far."""
        for line in self.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def log_tail(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-4000:]

    def poll_ready(self) -> bool:
        """Whether the process says that it is ready. Raises AssertionError with its log when it has ended."""
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}")
        for event in self.events():
            if event.get("event") == self.ready_event:
                self.address = event["address"]
                return True
        return False

    def send(self, signal_number: int) -> None:
        self.told_to_stop |= signal_number in (signal.SIGTERM, signal.SIGINT)
        self.process.send_signal(signal_number)

    def tell_to_stop(self) -> None:
        """As an operator would, once: a second signal ends a process at once."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            if not self.told_to_stop:
                self.send(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout_s: float = 30.0) -> int:
        """End the process as an operator would. Returns its exit code."""
        self.tell_to_stop()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"{self.name} did not end within {timeout_s} s:\n{self.log_tail()}") from None


@dataclass
class ProcessCluster:
    """Router and workers as processes, in `directory`."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[RoleProcess] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for role in self.processes:
                print(f"--- {role.name}\n{role.log_tail()}", file=sys.stderr)
        self.stop()

    def launch(self, module: str, name: str, *flags: str) -> RoleProcess:
        """Start one process without waiting for it."""
        log_path = self.directory / f"{name}.log"
        command = [sys.executable, "-m", module, *flags, "--log-format", "json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        ready_event = "router ready" if module == "router" else "worker ready"
        role = RoleProcess(name=name, process=process, log_path=log_path, ready_event=ready_event)
        self.processes.append(role)
        return role

    def launch_worker(self, role: str, model: str, *flags: str, name: str = "") -> RoleProcess:
        """Start a prefill or decode worker without waiting for it; with stock modules unless `flags` say otherwise."""
        name = name or f"{role}-{len(self.processes)}"
        common = ["--model", model, "--worker-id", name, "--listen", "127.0.0.1:0", "--threads", "1"]
        if "--weights" not in flags:  # what tests compare with: exact, and no first start compiles anything
            common += ["--weights", "stock"]
        if role == "decode" and "--kv-listen" not in flags:
            common += ["--kv-listen", "127.0.0.1:0"]
        return self.launch(f"{role}_worker", name, *common, *flags)

    def wait_ready(self, *roles: RoleProcess) -> None:
        for role in roles:
            wait_until(role.poll_ready, timeout_s=START_TIMEOUT_S, what=f"{role.name} ready")

    def start_workers(
        self,
        model: str,
        *,
        prefill: int = 1,
        decode: int = 1,
        flags: tuple[str, ...] = (),
        prefill_flags: tuple[str, ...] = (),
        decode_flags: tuple[str, ...] = (),
    ) -> list[RoleProcess]:
        """Start workers of one model at once and wait for all of them."""
        workers = [self.launch_worker("prefill", model, *flags, *prefill_flags) for _ in range(prefill)]
        workers += [self.launch_worker("decode", model, *flags, *decode_flags) for _ in range(decode)]
        self.wait_ready(*workers)
        return workers

    def start_router(self, *flags: str) -> RoleProcess:
        """Start the router on all workers that run, and wait until it has reached every one of them."""
        workers = [role for role in self.processes if role.address and role.process.poll() is None]
        addresses = [argument for role in workers for argument in ("--workers", role.address)]
        router = self.launch("router", "router", "--listen", "127.0.0.1:0", *addresses, *flags)
        self.wait_ready(router)
        wait_until(
            lambda: sum(worker.state == admin_pb2.WORKER_STATE_READY for worker in self.workers()) == len(workers),
            timeout_s=30,
            what="router knows all workers",
        )
        return router

    @property
    def router(self) -> RoleProcess:
        return next(role for role in self.processes if role.ready_event == "router ready")

    @property
    def address(self) -> str:
        return self.router.address

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def workers(self) -> list[admin_pb2.Worker]:
        """The router's table of workers."""
        with self.channel() as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return list(stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10).workers)

    def worker(self, worker_id: str) -> admin_pb2.Worker:
        return next(worker for worker in self.workers() if worker.id == worker_id)

    def wait_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until every KV block of every live worker is free and nothing runs."""

        def idle() -> bool:
            ready = [worker for worker in self.workers() if worker.state == admin_pb2.WORKER_STATE_READY]
            return all(worker.free_kv_blocks == worker.total_kv_blocks and not worker.unfinished for worker in ready)

        wait_until(idle, timeout_s=timeout_s, what="all blocks free")

    def stop(self) -> None:
        """End all processes; the router first, so that it does not look for the workers."""
        for role in reversed(self.processes):
            role.tell_to_stop()
        for role in reversed(self.processes):
            role.stop()
