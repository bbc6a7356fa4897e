"""Router and workers as processes, each behind a link that can fail, and each started again when it has ended.

    clients ──▶ router ──link──▶ workers        prefill ──link──▶ decode   (KV over tcp; shared memory has no link)

A worker keeps its id, its addresses and its links through all its lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import trustme

from chaos.pooling import MODEL_NAME
from chaos.schedule import ROUTER
from harness import START_TIMEOUT_S, ProcessCluster, RoleProcess
from proxy import FaultyLink
from twinstage.v1 import admin_pb2, admin_pb2_grpc

MARK = "TWINSTAGE_TEST_RUN"  # in the environment of every process, by which those of this run are known
POLL_S = 0.05
EXIT_TIMEOUT_S = 30.0
_POISON_LIMIT = 50  # no request kills a worker here, and faults that meet one twice must not make it look so
# Clients find a new router soon, and get an error at once while there is none.
_CLIENT_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.enable_retries", 0),  # what the service answers is judged, not what a retry makes of it
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cluster consists of. `transport` is shm, tcp, tls (tcp with it) or both: then decode workers take turns.

    The first decode worker guesses tokens by n-grams, the third by a draft model, which is the model itself.
    """

    model: str
    embedder: str = ""
    embedders: int = 0  # workers of the embedder
    prefill: int = 2
    decode: int = 3
    transport: str = "both"
    weights: str = "fp32"
    deterministic: bool = False
    kv_cache_bytes: int = 8 << 20
    drain_timeout_s: float = 10.0
    report_interval_s: float = 0.5  # after three in silence, the router takes a worker for lost

    def transports(self) -> Iterator[tuple[str, str]]:
        """Worker ids and the transports each can use."""
        for number in range(self.prefill):
            yield f"prefill-{number}", "shm,tcp" if self.transport == "both" else self._flag
        for number in range(self.decode):
            own = ("shm", "tcp")[number % 2] if self.transport == "both" else self._flag
            yield f"decode-{number}", own

    @property
    def _flag(self) -> str:
        return "tcp" if self.transport == "tls" else self.transport

    @property
    def worker_ids(self) -> tuple[str, ...]:
        generating = [worker_id for worker_id, _ in self.transports()]
        return (*generating, *self.embedder_ids)

    @property
    def embedder_ids(self) -> tuple[str, ...]:
        return tuple(f"embedder-{number}" for number in range(self.embedders))

    @property
    def link_names(self) -> tuple[str, ...]:
        """All links, by what they lead to: `router:WORKER`, `kv:WORKER`."""
        names = [f"router:{worker_id}" for worker_id in self.worker_ids]
        names += [f"kv:{name}" for name, transport in self.transports() if name[0] == "d" and transport == "tcp"]
        return tuple(names)

    @property
    def common_flags(self) -> tuple[str, ...]:
        flags = ["--model", self.model, "--threads", "1", "--weights", self.weights]
        flags += ["--kv-cache-bytes", str(self.kv_cache_bytes), "--drain-timeout", str(self.drain_timeout_s)]
        return (*flags, "--deterministic") if self.deterministic else tuple(flags)

    def speculative_flags(self, worker_id: str) -> list[str]:
        match worker_id:
            case "decode-0":
                return ["--speculative", "ngram", "--ngram-min", "1"]
            case "decode-2":
                draft = ["--draft-model", self.model, "--draft-weights", self.weights, "--draft-kv-cache-bytes", "8MiB"]
                return ["--speculative", "draft_model", *draft]
            case _:
                return []


@dataclass(slots=True, kw_only=True)
class Member:
    """The router or a worker, through all its lives. `process` is None while it is down."""

    name: str
    module: str
    flags: tuple[str, ...]
    process: RoleProcess | None = None
    lives: list[RoleProcess] = field(default_factory=list)
    stopped: bool = False  # by SIGSTOP

    @property
    def log_paths(self) -> list[Path]:
        return [life.log_path for life in self.lives]


class ChaosCluster:
    """Starts with `opened`. What ends a member here is told to `exit_codes` when it should have ended by itself."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self.shape = shape
        self.mark = directory.name + f"-{os.getpid()}"
        self.socket_directory = directory / "kv"
        self._directory = directory
        self._processes = ProcessCluster(directory, environment={MARK: self.mark})
        self.links: dict[str, FaultyLink] = {}
        self.members: dict[str, Member] = {}
        self.router_address = f"127.0.0.1:{_lasting_port()}"
        self.exit_codes: list[tuple[str, int]] = []
        self.channel = grpc.aio.insecure_channel(self.router_address, options=_CLIENT_OPTIONS)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[ChaosCluster]:
        """The cluster, once all workers are ready. Whatever happens, no process outlives the scope."""
        try:
            await self._start()
            yield self
        finally:
            await self.channel.close(None)
            for member in self.members.values():
                if member.process is not None:
                    member.process.send(signal.SIGKILL)
            for link in self.links.values():
                await link.close()

    async def _start(self) -> None:
        tls = self._tls_flags() if self.shape.transport == "tls" else ()
        for worker_id, transports in self.shape.transports():
            role = worker_id.split("-")[0]
            address = await self._link(f"router:{worker_id}")
            own = ["--worker-id", worker_id, "--listen", address, "--kv-transports", transports]
            if role == "decode":
                own += self.shape.speculative_flags(worker_id)
                own += ["--kv-socket-directory", str(self.socket_directory)]
                if "tcp" in transports:
                    kv_address = await self._link(f"kv:{worker_id}")
                    own += ["--kv-listen", kv_address, "--kv-advertise", self.links[f"kv:{worker_id}"].address]
            self.members[worker_id] = Member(
                name=worker_id, module=f"{role}_worker", flags=(*self.shape.common_flags, *own, *tls)
            )
        for worker_id in self.shape.embedder_ids:
            own = ["--worker-id", worker_id, "--listen", await self._link(f"router:{worker_id}"), "--threads", "1"]
            own += ["--model", self.shape.embedder, "--served-model-name", MODEL_NAME]
            own += ["--drain-timeout", str(self.shape.drain_timeout_s)]
            self.members[worker_id] = Member(name=worker_id, module="prefill_worker", flags=tuple(own))
        workers = [
            flag for name in self.shape.worker_ids for flag in ("--workers", self.links[f"router:{name}"].address)
        ]
        flags = ("--listen", self.router_address, "--report-interval", str(self.shape.report_interval_s), *workers)
        flags += ("--poison-limit", str(_POISON_LIMIT))
        self.members[ROUTER] = Member(name=ROUTER, module="router", flags=flags)
        first, *others = self.members.values()
        await self.start(first)  # it leaves in the cache what the others only read
        await asyncio.gather(*(self.start(member) for member in others))
        await self.wait_ready()

    def _tls_flags(self) -> tuple[str, ...]:
        authority = trustme.CA()
        issued = authority.issue_cert("worker.internal")
        files = {name: self._directory / f"kv-{name}.pem" for name in ("certificate", "key", "ca")}
        issued.cert_chain_pems[0].write_to_path(files["certificate"])
        issued.private_key_pem.write_to_path(files["key"])
        authority.cert_pem.write_to_path(files["ca"])
        return tuple(word for name, path in files.items() for word in (f"--kv-tls-{name}", str(path)))

    async def _link(self, name: str) -> str:
        """Make a link and return the address to which it leads."""
        target = f"127.0.0.1:{_lasting_port()}"
        self.links[name] = FaultyLink(target)
        await self.links[name].open()
        return target

    # --- lives ------------------------------------------------------------------------------------

    async def start(self, member: Member) -> None:
        """Begin a life, and return when it is ready. Raises AssertionError when it ends instead."""
        life = self._processes.launch(member.module, f"{member.name}.{len(member.lives)}", *member.flags)
        member.lives.append(life)
        member.process = life
        await eventually(life.poll_ready, timeout_s=START_TIMEOUT_S)

    async def end(self, member: Member, number: signal.Signals) -> None:
        """End a life by a signal; SIGTERM must be obeyed in time and with exit code 0."""
        life, member.process = member.process, None
        assert life is not None
        life.send(number)
        try:
            await eventually(lambda: life.process.poll() is not None, timeout_s=EXIT_TIMEOUT_S)
        except TimeoutError:
            life.kill()
        if number is signal.SIGTERM:
            self.exit_codes.append((life.name, life.process.wait()))

    async def stop(self) -> None:
        """End everything as an operator would, the router first."""
        await self.end(self.members[ROUTER], signal.SIGTERM)
        workers = [member for member in self.members.values() if member.process is not None]
        await asyncio.gather(*(self.end(member, signal.SIGTERM) for member in workers))

    # --- what the router says ---------------------------------------------------------------------

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    async def workers(self) -> list[admin_pb2.Worker]:
        """The router's table; empty while there is no router."""
        try:
            response = await self.admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return []
        return list(response.workers)

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the router says that every worker is ready. Raises TimeoutError."""
        await eventually(self._all_ready, timeout_s=timeout_s)

    async def _all_ready(self) -> bool:
        ready = {worker.id for worker in await self.workers() if worker.state == admin_pb2.WORKER_STATE_READY}
        return ready == set(self.shape.worker_ids)


def _lasting_port() -> int:
    """A free port that no outgoing connection takes while its server is down: below those that Linux gives away."""
    for _ in range(100):
        port = random.randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


async def eventually(condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(POLL_S)
