"""Servers under the load of `twinstage bench`, and what is read from its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from bench.pausing import awake
from twinstage.bench import LoadOptions, LoadResult, Protocol, TokenRange, run_load
from twinstage.errors import InternalError
from twinstage.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from bench.peers.servers import PeerServer

MODEL = "demo"  # the name that requests to a peer's server use
TOKENS = TokenRange(128, 128)
SLOTS, CONTEXT = 16, 512  # requests that a peer's server has room for at once, and tokens of each
_WARM_TOKENS, _TRIAL_TOKENS = TokenRange(8, 8), TokenRange(64, 64)
_VOCABULARY = 49_152
_READY_S = 30.0
QUANTITIES: Mapping[str, tuple[str, Callable[[LoadResult], float]]] = {
    "output": ("tokens/s", lambda result: result.output_tokens_per_s),
    "time to first token p50": ("ms", lambda result: 1e3 * result.ttft.p50_s if result.ttft else 0.0),
    "inter-token gap p50": ("ms", lambda result: 1e3 * result.itl.p50_s if result.itl else 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server under load. A peer's `process` is stopped while others are measured; ours does nothing when idle."""

    name: str
    address: str
    protocol: Protocol
    model: str = ""
    process: PeerServer | None = None

    @classmethod
    def of_peer(cls, server: PeerServer) -> Server:
        """A peer's server, which is stopped after each load."""
        return cls(name=server.name, address=server.address, protocol=Protocol.OPENAI, model=MODEL, process=server)

    def load(self, *, concurrency: int, requests: int, prompt_seed: int, output: TokenRange = TOKENS) -> LoadResult:
        """Raises InternalError when a request failed."""
        options = LoadOptions(
            addresses=(self.address,),
            protocol=self.protocol,
            model=self.model,
            concurrency=concurrency,
            requests=requests,
            warmup_requests=0,
            prompt_tokens=TOKENS,
            output_tokens=output,
            vocabulary_size=_VOCABULARY,
            prompt_seed=prompt_seed,
        )
        if self.protocol is Protocol.TWINSTAGE:
            wait_all_ready(self.address)
        with awake(self.process) if self.process is not None else nullcontext():
            result = asyncio.run(run_load(options))
        if result.requests.failed or result.ttft is None or result.itl is None:
            raise InternalError(f"{self.name} failed {result.requests.failed} requests: {result.errors}")
        return result

    def trial_rate(self) -> float:
        """Output tokens per second of the better of two runs with all its slots in use. Raises InternalError."""
        self.warm()
        runs = [self.load(concurrency=SLOTS, requests=SLOTS, prompt_seed=seed, output=_TRIAL_TOKENS) for seed in (7, 8)]
        return max(run.output_tokens_per_s for run in runs)

    def warm(self) -> None:
        """A few short requests, so that what is done once is done. Raises InternalError."""
        self.load(concurrency=4, requests=4, prompt_seed=99, output=_WARM_TOKENS)


def wait_all_ready(address: str) -> None:
    """Return once a router can use all of its workers; peers may have kept every core from them for many seconds.

    Raises InternalError when that takes long.
    """
    deadline_s = time.monotonic() + _READY_S
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        while time.monotonic() < deadline_s:
            workers = stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_READY_S).workers
            if workers and all(worker.state == admin_pb2.WORKER_STATE_READY for worker in workers):
                return
            time.sleep(0.05)
    raise InternalError(f"not all workers of the router at {address} were ready within {_READY_S:g} s")
