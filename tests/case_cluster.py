"""A cluster for the cases of failure: workers that several tests stop, kill and start again, for both transports.

    prefill-0, prefill-1                    speak both transports
    shm-0, shm-1 / tcp-0, tcp-1             decode workers that speak one
    router-shm, router-tcp                  each with all prefill workers and the decode workers of its transport

So one set of workers serves the tests over either transport.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from faulty_worker import FAULTY
from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

LEASE_S = 1.5
KV_BYTES = 16 << 20
TESTS = Path(__file__).resolve().parent
WORKER_FLAGS = ("--weights", "fp32", "--kv-cache-bytes", str(KV_BYTES), "--threads", "1", "--lease", str(LEASE_S))
ROUTER_FLAGS = ("--report-interval", "0.2", "--worker-wait", "60", "--resume-wait", "60")


@dataclass
class Answer:
    """What a client got."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    finish: str = ""
    usage: tuple[int, int] = (0, 0)
    retries: int = 0
    times: list[float] = field(default_factory=list)  # of events with tokens; monotonic

    def content(self) -> tuple[object, ...]:
        """All that must be equal, however it came about."""
        return self.text, self.token_ids, self.logprobs, self.finish, self.usage


@dataclass
class Choices:
    """What a client got of several choices."""

    by_index: dict[int, Answer] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    retries: int = 0

    def at(self, index: int) -> Answer:
        return self.by_index.setdefault(index, Answer())

    def content(self) -> tuple[object, ...]:
        answers = [answer.content() for _, answer in sorted(self.by_index.items())]
        return *answers, self.usage


@dataclass
class CaseCluster:
    """The processes by name, and how each was started."""

    processes: ProcessCluster
    by_name: dict[str, RoleProcess] = field(default_factory=dict)
    _flags: dict[str, tuple[str, ...]] = field(default_factory=dict)

    # --- lives ------------------------------------------------------------------------------------

    def launch_worker(self, name: str, role: str, model: Path, *flags: str) -> None:
        own = ("--model", str(model), "--worker-id", name, "--listen", "127.0.0.1:0", *WORKER_FLAGS, *flags)
        self._flags[name] = (role, *own)
        self.by_name[name] = self.processes.launch("faulty_worker", name, role, *own)

    def launch_router(self, transport: str) -> None:
        workers = [self.by_name[name].address for name in self.workers_of(transport)]
        addresses = [part for address in workers for part in ("--workers", address)]
        name = f"router-{transport}"
        self._flags[name] = ("--listen", "127.0.0.1:0", *addresses, *ROUTER_FLAGS)
        self.by_name[name] = self.processes.launch("router", name, *self._flags[name])

    def restart(self, name: str) -> None:
        """Start what has ended again, at its address, without waiting for it."""
        dead = self.by_name[name]
        dead.process.wait(10)
        flags = list(self._flags[name])
        flags[flags.index("--listen") + 1] = dead.address
        module = "router" if name.startswith("router") else "faulty_worker"
        life = sum(process.name.startswith(name) for process in self.processes.processes)
        self.by_name[name] = self.processes.launch(module, f"{name}.{life}", *flags)
        self.by_name[name].address = dead.address  # known at once: it may die again before anybody saw it ready

    def revive(self) -> list[str]:
        """Start all again that has ended, so that one failure does not become many. Returns who had."""
        dead = [name for name, process in self.by_name.items() if process.process.poll() is not None]
        for name in dead:
            self.restart(name)
        return dead

    def workers_of(self, transport: str) -> list[str]:
        decode = [name for name in self._flags if name.startswith(transport)]
        return ["prefill-0", "prefill-1", *decode]

    @contextlib.contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        """Processes that do nothing, but live."""
        try:
            for name in names:
                self.by_name[name].send(signal.SIGSTOP)
            yield
        finally:
            for name in names:
                self.by_name[name].send(signal.SIGCONT)

    # --- what they say ----------------------------------------------------------------------------

    def table(self, transport: str) -> dict[str, admin_pb2.Worker]:
        """A router's table of workers, by id."""
        with grpc.insecure_channel(self.by_name[f"router-{transport}"].address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            response = stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10, wait_for_ready=True)
            return {worker.id: worker for worker in response.workers}

    def wait_ready(self, transport: str, *, timeout_s: float = 60.0) -> None:
        """Wait until a router can use all of its workers."""
        names = set(self.workers_of(transport))

        def ready() -> bool:
            table = self.table(transport).items()
            return names == {name for name, worker in table if worker.state == admin_pb2.WORKER_STATE_READY}

        wait_until(ready, timeout_s=timeout_s, what=f"router-{transport} knows all workers")

    def load(self, name: str) -> tuple[worker_pb2.WatchLoadResponse, int]:
        """What a worker itself says, whatever routers know; and how many KV blocks it has."""
        with grpc.insecure_channel(self.by_name[name].address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            total = stub.Describe(worker_pb2.DescribeRequest(), timeout=10).total_kv_blocks
            loads = stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=1000), timeout=10)
            load = next(loads)
            loads.cancel()
            return load, total

    def is_idle(self, name: str) -> bool:
        """Whether a worker has all its blocks back, and nothing to do."""
        load, total = self.load(name)
        return load.free_kv_blocks == total and not load.running and not load.waiting

    def wait_idle(self, *names: str, timeout_s: float = 20.0) -> None:
        for name in names:
            wait_until(lambda name=name: self.is_idle(name), timeout_s=timeout_s, what=f"{name} is idle")  # type: ignore[misc]

    # --- calls ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stub(self, transport: str) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
        with grpc.insecure_channel(self.by_name[f"router-{transport}"].address) as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)


@contextlib.contextmanager
def case_cluster(directory: Path, model: Path) -> Iterator[CaseCluster]:
    """The cluster, once everyone is ready. Its processes end with the scope, by themselves and with exit code 0."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with ProcessCluster(directory, environment={"PYTHONPATH": path, FAULTY: "prefill-0,decode"}) as processes:
        cluster = CaseCluster(processes)
        cluster.launch_worker("prefill-0", "prefill", model, "--max-tokens-per-step", "32", "--no-prefix-cache")
        processes.wait_ready(cluster.by_name["prefill-0"])  # it leaves in the cache what the others only read
        cluster.launch_worker("prefill-1", "prefill", model, "--max-tokens-per-step", "32", "--no-prefix-cache")
        for transport in ("shm", "tcp"):
            for number in range(2):
                own = ("--kv-transports", transport, "--kv-listen", "127.0.0.1:0")
                cluster.launch_worker(f"{transport}-{number}", "decode", model, *own)
        processes.wait_ready(*cluster.by_name.values())
        for transport in ("shm", "tcp"):
            cluster.launch_router(transport)
        processes.wait_ready(*cluster.by_name.values())
        for transport in ("shm", "tcp"):
            cluster.wait_ready(transport)
        yield cluster


def collect(events: Iterator[generation_pb2.GenerateStreamResponse]) -> Answer:
    """Read a stream to its end. Raises grpc.RpcError with what it ended with."""
    choices = collect_choices(events)
    answer = choices.at(0)
    answer.usage, answer.retries = choices.usage, choices.retries
    return answer


def collect_choices(events: Iterator[generation_pb2.GenerateStreamResponse]) -> Choices:
    """The same of a stream of several choices, each of which must end once."""
    choices = Choices()
    for event in events:
        kind = event.WhichOneof("event")
        if kind == "delta":
            answer = choices.at(event.delta.index)
            assert not answer.finish, "a token after the end"
            answer.text += event.delta.text
            answer.token_ids += event.delta.token_ids
            answer.logprobs += map(str, event.delta.logprobs)
            answer.times.append(time.monotonic())
        elif kind == "finished":
            answer = choices.at(event.finished.index)
            assert not answer.finish, "a second end"
            answer.finish = f"{event.finished.finish_reason} {event.finished.matched_stop}"
        elif kind == "summary":
            choices.usage = (event.summary.usage.prompt_tokens, event.summary.usage.completion_tokens)
            choices.retries = event.summary.placement.retries
    return choices


def of_unary(response: generation_pb2.GenerateResponse) -> Answer:
    """The same of a call with one response."""
    choices = choices_of_unary(response)
    (answer,) = choices.by_index.values()
    answer.usage, answer.retries = choices.usage, choices.retries
    return answer


def choices_of_unary(response: generation_pb2.GenerateResponse) -> Choices:
    return Choices(
        by_index={
            result.index: Answer(
                text=result.text,
                token_ids=list(result.token_ids),
                logprobs=list(map(str, result.logprobs)),
                finish=f"{result.finish_reason} {result.matched_stop}",
            )
            for result in response.results
        },
        usage=(response.usage.prompt_tokens, response.usage.completion_tokens),
        retries=response.placement.retries,
    )


def request(
    prompt: tuple[int, ...],
    *,
    max_tokens: int,
    seed: int | None = None,
    logprobs: int | None = None,
    n: int | None = None,
    request_id: str = "",
    **stopping: object,
) -> generation_pb2.GenerateRequest:
    """Greedy without a seed; ends with `max_tokens` unless `stopping` says otherwise."""
    options = {"ignore_eos": True, **stopping}
    made = generation_pb2.GenerateRequest(
        request_id=request_id,
        sampling=common_pb2.SamplingOptions(temperature=0.0 if seed is None else 0.8, seed=seed, n=n),
        stopping=common_pb2.StoppingOptions(max_tokens=max_tokens, **options),  # type: ignore[arg-type]
        output=common_pb2.OutputOptions(return_token_ids=True, logprobs=logprobs),
    )
    made.prompt_token_ids.ids[:] = prompt
    return made


def prompt_of(length: int, *, salt: int = 0, marks: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Token ids without any mark but `marks`."""
    return (*marks, *(3 + (17 * index + 5 * salt + index * index) % 200 for index in range(length - len(marks))))
