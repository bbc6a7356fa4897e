"""A cluster on this machine: a router, its prefill workers and its decode workers, as child processes.

    with Cluster(ClusterConfig(models=("demo",), port=0)) as cluster:
        cluster.wait_ready(timeout_s=120)
        client = TwinstageClient(cluster.address)

Workers listen on loopback, on ports that the system picks; the router starts when all of them are ready. Whatever
happens (a process is ready, a process ended, somebody interrupts) arrives in one queue, so no wait polls.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from twinstage.addresses import join_address
from twinstage.cgroups import usable_cpus
from twinstage.cli.addresses import check_port_is_free, reachable
from twinstage.cli.child import Child
from twinstage.cli.cluster_config import STOP_GRACE_S, ClusterConfig
from twinstage.cli.cluster_events import Ended, Event, Interrupted, Known, Ready, Serving
from twinstage.cli.cluster_secret import ClusterSecret
from twinstage.cli.model_choice import ModelChoice
from twinstage.cpus import by_core, format_cpus, share_out
from twinstage.errors import Cancelled, ConfigError, DeadlineExceeded, InternalError, TwinstageError
from twinstage.types import Role, Task

OnLine = Callable[[str, str, dict[str, Any] | None], None]

ROUTER = "router"
# Encoding computes without a pause; beside generation, router and clients are to get a CPU at once, for each token.
ENCODING_NICENESS = 10
DRAIN_S = 5.0  # of the processes themselves, which need the rest of the grace period to free what they hold
_SERVICES = {
    Task.GENERATE: "twinstage.v1.GenerationService",
    Task.EMBED: "twinstage.v1.EmbeddingService",
    Task.CLASSIFY: "twinstage.v1.EmbeddingService",
    Task.SCORE: "twinstage.v1.ScoringService",
}


class Cluster:
    """The processes of one cluster. `on_line` is called with (process name, line, log event or None) on threads.

    `interrupt` and `kill` may be called from a signal handler or any thread; everything else belongs to one thread,
    which must live as long as the cluster.
    """

    def __init__(self, config: ClusterConfig, *, on_line: OnLine | None = None) -> None:
        self.config = config
        self.processes: dict[str, Child] = {}
        self.models: tuple[ModelChoice, ...] = config.chosen_models()
        self._on_line = on_line
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._unknown: set[str] = set()  # workers that the router has not reached yet
        self._served: frozenset[str] = frozenset()  # gRPC services, as the router says
        self._secret = ClusterSecret(config.environment)
        self._check()

    @property
    def address(self) -> str:
        """Where to reach the router, as "host:port"; empty until it listens."""
        router = self.processes.get(ROUTER)
        if router is None or not router.address:
            return ""
        return reachable(router.address)

    def start(self) -> None:
        """Start the workers. Raises ConfigError when the router's port is taken; nothing was started then."""
        check_port_is_free(self.config.host, self.config.port)
        shares = iter(self._compute_flags())
        for model in self.models:
            for role in (Role.PREFILL, Role.DECODE):
                for index in range(self._count(model, role)):
                    self._start_worker(model, role, index=index, compute_flags=next(shares))

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the workers, start the router and wait until it serves with all of them.

        Raises ConfigError or InternalError when a process ended, DeadlineExceeded, and Cancelled after `interrupt`.
        """
        deadline_s = time.monotonic() + timeout_s
        workers = list(self.processes.values())
        self._unknown = {worker.name for worker in workers}
        while not all(worker.address for worker in workers):
            self._next_event(deadline_s, waiting_for="the workers")
        self._start_router([worker.address for worker in workers])
        while not self.address:
            self._next_event(deadline_s, waiting_for="the router")
        services = {_SERVICES[model.task] for model in self.models}
        while self._unknown or not services <= self._served:
            waiting_for = f"the router's connection to {', '.join(sorted(self._unknown)) or 'its workers'}"
            self._next_event(deadline_s, waiting_for=waiting_for)
        self._secret.remove()  # all have read it

    def wait(self) -> None:
        """Wait until somebody interrupts.

        A worker that ends by itself is reported, and the others go on. Raises ConfigError or InternalError when it was
        the last of its kind, or the router.
        """
        while True:
            match self._events.get():
                case Interrupted():
                    return
                case Ended(child):
                    if not self._has_substitute(child):
                        raise _error_of(child)
                    self._report_line(child, f"{child.end_in_words()}; the others go on", None)

    def interrupt(self) -> None:
        """End the wait that is in progress, or the next one."""
        self._events.put(Interrupted())

    def kill(self) -> None:
        """End every process at once."""
        for child in list(self.processes.values()):
            child.send(signal.SIGKILL)

    def stop(self, on_ended: Callable[[str], None] = lambda _name: None) -> dict[str, int | None]:
        """End the router, then the workers: SIGTERM, and SIGKILL for those that do not end within the grace period.

        Idempotent. Returns the exit codes by name; `on_ended` gets each name as soon as its process has ended.
        """
        router = [child for name, child in self.processes.items() if name == ROUTER]
        workers = [child for name, child in self.processes.items() if name != ROUTER]
        self._end(router, on_ended)
        self._end(workers, on_ended)
        self._secret.remove()
        return {name: child.exit_code for name, child in self.processes.items()}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _check(self) -> None:
        """Raises ConfigError for counts that give no cluster."""
        if (
            any(model.task is Task.GENERATE for model in self.models)
            and min(self.config.prefill, self.config.decode) < 1
        ):
            raise ConfigError("--prefill and --decode: a generation model needs at least one worker of each")
        self.config.security.check()

    def _count(self, model: ModelChoice, role: Role) -> int:
        if model.task is not Task.GENERATE:
            return 1 if role is Role.PREFILL else 0
        return self.config.prefill if role is Role.PREFILL else self.config.decode

    def _num_workers(self) -> int:
        return sum(self._count(model, role) for model in self.models for role in Role)

    @property
    def _log_level(self) -> str:
        """At least "info", by which processes say that they are ready; `on_line` may drop what it does not want."""
        return "debug" if self.config.log_level == "debug" else "info"

    def _has_substitute(self, ended: Child) -> bool:
        """Whether another process of the same kind runs. Names are kind and number."""
        kind, _, _ = ended.name.rpartition("-")
        return any(
            child.is_running and name.rpartition("-")[0] == kind and child is not ended
            for name, child in self.processes.items()
            if name != ROUTER
        )

    def _compute_flags(self) -> list[list[str]]:
        """What each worker is told of threads and CPUs, in the order in which they start."""
        cpus, usable, num_workers = os.sched_getaffinity(0), usable_cpus(), self._num_workers()
        threads = self.config.threads or max(1, usable // num_workers)
        shares = share_out(by_core(cpus), num_workers) if self.config.pin_cpus and self.config.threads is None else None
        if shares is None:
            return [["--threads", str(threads)]] * num_workers
        numbers = [len(share) if usable == len(cpus) else threads for share in shares]
        return [
            ["--threads", str(number), "--cpus", format_cpus(share)]
            for number, share in zip(numbers, shares, strict=True)
        ]

    def _start_worker(self, model: ModelChoice, role: Role, *, index: int, compute_flags: list[str]) -> None:
        name = f"{role.value}-{index}" if len(self.models) == 1 else f"{model.label}-{role.value}-{index}"
        flags = ["--model", model.reference, "--worker-id", name, "--listen", "127.0.0.1:0"]
        flags += [*compute_flags, "--log-level", self._log_level, *model.worker_flags, *self.config.worker_flags(role)]
        generates = any(other.task is Task.GENERATE for other in self.models)
        niceness = ENCODING_NICENESS if generates and model.task is not Task.GENERATE else 0
        self._start(name, f"{role.value}_worker", flags, niceness=niceness)

    def _start_router(self, worker_addresses: list[str]) -> None:
        flags = ["--listen", join_address(self.config.host, self.config.port), "--log-level", self._log_level]
        for address in worker_addresses:
            flags += ["--workers", address]
        self._start(ROUTER, "router", [*flags, *self.config.security.flags, *self.config.router_flags])

    def _start(self, name: str, module: str, flags: list[str], *, niceness: int = 0) -> None:
        own = {"TWINSTAGE_DRAIN_TIMEOUT": str(DRAIN_S), **self._secret.environment()}
        environment = {**own, **self.config.environment}
        ready_event = "router ready" if name == ROUTER else "worker ready"  # the router logs both
        without = () if name == ROUTER else self.config.security.variables
        child = Child(
            name,
            module,
            flags,
            ready_event=ready_event,
            environment=environment,
            without=without,
            niceness=niceness,
        )
        self.processes[name] = child
        directory = self.config.log_directory
        child.read_log(
            log_path=None if directory is None else directory / f"{name}.log",
            on_line=self._report_line,
            on_ready=lambda ready: self._events.put(Ready(ready)),
            on_exit=lambda ended: self._events.put(Ended(ended)),
        )

    def _report_line(self, child: Child, line: str, event: dict[str, Any] | None) -> None:
        if child.name == ROUTER and event is not None and event["event"] == "worker ready":
            self._events.put(Known(str(event.get("worker", ""))))
        if child.name == ROUTER and event is not None and event["event"] == "serving":
            self._events.put(Serving(frozenset(event.get("services", ()))))
        if self._on_line is not None:
            self._on_line(child.name, line, event)

    def _next_event(self, deadline_s: float | None, *, waiting_for: str) -> Event:
        """The next event, if it is a good one."""
        try:
            event = self._events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except Empty:
            raise DeadlineExceeded(f"{waiting_for} did not get ready in time; see the log above") from None
        if isinstance(event, Interrupted):
            raise Cancelled("stopped before the cluster was ready")
        if isinstance(event, Ended):
            raise _error_of(event.child)
        if isinstance(event, Known):
            self._unknown.discard(event.worker)
        if isinstance(event, Serving):
            self._served = event.services
        return event

    def _end(self, children: list[Child], on_ended: Callable[[str], None]) -> None:
        children = [child for child in children if child.is_running]
        for child in children:
            child.send(signal.SIGCONT)  # a stopped process would not see the next one
            child.send(signal.SIGTERM)
        deadline_s = time.monotonic() + self.config.stop_grace_s
        for child in children:
            if not child.join(max(0.0, deadline_s - time.monotonic())):
                child.send(signal.SIGKILL)
                child.join(STOP_GRACE_S)
            on_ended(child.name)


def _error_of(ended: Child) -> TwinstageError:
    # 2 is what roles end with when flags, model or machine are wrong: something the operator can change.
    return (ConfigError if ended.exit_code == 2 else InternalError)(ended.end_in_words())
