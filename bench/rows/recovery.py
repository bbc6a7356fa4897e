"""How long a client waits when a worker dies or is stopped: on two prefill and two decode workers of the demo model.

The fault meets the one worker of its role that computes for the only request. A killed process closes its connections,
which the router sees at once; a stopped one is only silent, and is noticed after three report intervals. Then the
prompt, with the tokens so far, is computed on the other workers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import READY_S, greedy
from twinstage.cli.child import Child
from twinstage.cli.cluster import Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.client import TwinstageClient
from twinstage.errors import InternalError
from twinstage.types import TokenPrompt
from twinstage.v1 import admin_pb2, admin_pb2_grpc

_PROMPT = tuple(range(1_000, 1_256))
_TOKENS, _BEFORE = 120, 40  # of the answer, and those that have come when a decode worker fails
_PATIENCE_S = 30.0
_REPORT_INTERVAL_S = 0.5
_SILENT_S = 3 * _REPORT_INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to which worker, and within which time the client must have its next token."""

    name: str
    role: str
    number: signal.Signals
    target_s: float


_FAULTS = (  # in this order: who is stopped comes back, who is killed does not
    Fault(name="prefill stopped", role="prefill", number=signal.SIGSTOP, target_s=_SILENT_S + 2.0),
    Fault(name="decode stopped in mid-stream", role="decode", number=signal.SIGSTOP, target_s=_SILENT_S + 3.0),
    Fault(name="prefill killed", role="prefill", number=signal.SIGKILL, target_s=2.0),
    Fault(name="decode killed in mid-stream", role="decode", number=signal.SIGKILL, target_s=3.0),
)


def measure(context: Context) -> RowResult:
    found: dict[str, list[float]] = {fault.name: [] for fault in _FAULTS}
    for round_number in range(context.rounds):
        context.progress(f"recovery, round {round_number + 1}")
        with _cluster(context) as cluster, TwinstageClient(cluster.address) as client:
            _warm_up(client)
            for fault in _FAULTS:
                found[fault.name].append(_recovery_s(cluster, client, fault))
    return result_of(found)


def result_of(found: dict[str, list[float]]) -> RowResult:
    """Seconds from each fault to the client's next token, by its name; a value per round."""
    return RowResult(
        measurements=[
            Measurement(case=name, engine="Twinstage", quantity="fault to the next token", unit="s", values=found[name])
            for name in found
        ],
        comparisons=[
            Comparison(
                case=fault.name,
                what="fault to the client's next token",
                values=found[fault.name],
                target=Target.at_most(fault.target_s),
                unit="s",
            )
            for fault in _FAULTS
        ],
        notes=[f"Workers report their load every {_REPORT_INTERVAL_S} s; three of them in silence are a loss."],
    )


def _recovery_s(cluster: Cluster, client: TwinstageClient, fault: Fault) -> float:
    """One request, one fault."""
    times: list[float] = []
    reading = threading.Thread(target=_read, args=(client, times))
    reading.start()
    if fault.role == "decode":
        _wait(lambda: len(times) >= _BEFORE, what="tokens")
    victim = _busy(cluster, fault.role)
    before = len(times)
    failed_s = time.monotonic()
    victim.send(fault.number)
    try:
        reading.join(_PATIENCE_S)
    finally:
        if fault.number is signal.SIGSTOP:
            _wait(lambda: victim.address not in _ready(cluster), what="loss of the worker that is stopped")
            victim.send(signal.SIGCONT)
            _wait(lambda: victim.address in _ready(cluster), what="return of the worker that was stopped")
    if len(times) != _TOKENS:
        raise InternalError(f"{fault.name}: {len(times)} tokens of {_TOKENS} came")
    # What was on its way when the worker failed comes at once; the wait is the longest gap after it.
    later = times[before:]
    return max(after - earlier for earlier, after in zip([failed_s, *later], later, strict=False))


@contextmanager
def _cluster(context: Context) -> Iterator[Cluster]:
    config = ClusterConfig(
        prefill=2,
        decode=2,
        port=0,
        threads=1,
        kv_cache_bytes="128MiB",
        router_flags=("--report-interval", str(_REPORT_INTERVAL_S)),
        prefill_flags=("--no-prefix-cache", "--max-tokens-per-step", "64"),
        log_directory=context.engines.log_directory,
    )
    with Cluster(config) as cluster:
        cluster.wait_ready(timeout_s=READY_S)
        yield cluster


def _warm_up(client: TwinstageClient) -> None:
    """Every pair has served once: connections stand, and what is made at the first use is made."""
    for first in range(4):
        client.generate(TokenPrompt(token_ids=(first + 5, 17, 29)), greedy(4))


def _read(client: TwinstageClient, times: list[float]) -> None:
    with client.generate_stream(TokenPrompt(token_ids=_PROMPT), greedy(_TOKENS)) as stream:
        for delta in stream:
            times += [time.monotonic()] * len(delta.token_ids)


def _busy(cluster: Cluster, role: str) -> Child:
    """The worker of a role that computes."""
    busy: list[Child] = []
    wanted = {"prefill": admin_pb2.WORKER_ROLE_PREFILL, "decode": admin_pb2.WORKER_ROLE_DECODE}[role]

    def look() -> bool:
        addresses = {worker.address for worker in _table(cluster) if worker.role == wanted and worker.running}
        busy[:] = [child for child in cluster.processes.values() if child.address in addresses]
        return bool(busy)

    _wait(look, what=f"a {role} worker that computes")
    return busy[0]


def _ready(cluster: Cluster) -> set[str]:
    """Addresses of the workers that the router can use."""
    return {worker.address for worker in _table(cluster) if worker.state == admin_pb2.WORKER_STATE_READY}


def _table(cluster: Cluster) -> Sequence[admin_pb2.Worker]:
    with grpc.insecure_channel(cluster.address) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5).workers


def _wait(condition: Callable[[], bool], *, what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise InternalError(f"no {what} within {_PATIENCE_S:g} s")
        time.sleep(0.005)


ROW = Row(name="recovery", title="Recovery from faults", measure=measure, limit_s=900)
