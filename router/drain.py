"""DrainWorker and UndrainWorker: what an operator does before and after touching a worker.

The worker itself is what drains, and says so in its load reports: other routers see it, and one that starts anew.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from router.worker_entry import WorkerEntry, WorkerLife
from router.workers import WorkerTable
from twinstage.errors import DeadlineExceeded, NotFound, WorkerLost
from twinstage.types import WorkerId, WorkerLoad

CALL_TIMEOUT_S = 5.0
LONGEST_WAIT_S = 3600.0  # when the caller sets no deadline
MARGIN_S = 0.2  # before the caller's deadline, so that it hears how much is left


async def drain_worker(
    workers: WorkerTable, worker_id: WorkerId, *, wait: bool, timeout_s: float | None
) -> WorkerEntry:
    """Let a worker drain; the table shows it when this returns. With `wait`, nothing is left on the worker then.

    A worker that ends or is undrained meanwhile is waited for no longer. Raises NotFound, WorkerLost, or
    DeadlineExceeded after `timeout_s` seconds.
    """
    until_s = _until_s(timeout_s)
    entry, life = _connected(workers, worker_id)
    await _tell(life.connection.drain, life, what="to drain", until_s=until_s)
    late = "was told to drain, and had not reported at the deadline that it does"
    await _told(workers, entry, life, lambda load: load.draining, until_s=until_s, late=lambda _: late)
    if wait:
        await _told(
            workers,
            entry,
            life,
            lambda load: not (load.draining and load.unfinished),
            until_s=until_s,
            late=lambda left: f"drains, and {left} requests were left at the deadline",
        )
    return entry


async def undrain_worker(workers: WorkerTable, worker_id: WorkerId, *, timeout_s: float | None) -> WorkerEntry:
    """Let a worker take requests again; the table shows it when this returns.

    Raises NotFound, WorkerLost, Draining when its process ends, or DeadlineExceeded.
    """
    until_s = _until_s(timeout_s)
    entry, life = _connected(workers, worker_id)
    await _tell(life.connection.undrain, life, what="to take requests again", until_s=until_s)
    late = "was told to take requests again, and had not reported at the deadline that it does"
    await _told(workers, entry, life, lambda load: not load.draining, until_s=until_s, late=lambda _: late)
    return entry


def _until_s(timeout_s: float | None) -> float:
    asked_s = LONGEST_WAIT_S if timeout_s is None else max(timeout_s - MARGIN_S, timeout_s / 2)
    return time.monotonic() + min(asked_s, LONGEST_WAIT_S)


def _connected(workers: WorkerTable, worker_id: WorkerId) -> tuple[WorkerEntry, WorkerLife]:
    """The worker of that id. Raises NotFound, or WorkerLost when it is not connected now."""
    known = [entry for entry in workers.entries if entry.description and entry.description.worker_id == worker_id]
    for entry in known:
        if entry.life is not None:
            return entry, entry.life
    if known:
        raise WorkerLost(f"worker {worker_id} is {known[0].state.value}: it cannot be told anything now")
    raise NotFound(f"there is no such worker as {worker_id!r}", resource_type="worker", resource_name=worker_id)


async def _tell(call: Callable[..., Awaitable[None]], life: WorkerLife, *, what: str, until_s: float) -> None:
    """Call the worker. Raises what it answers, or DeadlineExceeded after CALL_TIMEOUT_S or at `until_s` (monotonic)."""
    try:
        await call(timeout_s=max(0.0, min(CALL_TIMEOUT_S, until_s - time.monotonic())))
    except DeadlineExceeded:
        worker_id = life.description.worker_id
        raise DeadlineExceeded(f"worker {worker_id} was told {what}, and had not answered at the deadline") from None


async def _told(
    workers: WorkerTable,
    entry: WorkerEntry,
    life: WorkerLife,
    condition: Callable[[WorkerLoad], bool],
    *,
    until_s: float,
    late: Callable[[int], str],
) -> None:
    """Return when the worker's reports say so, or it has ended.

    Raises DeadlineExceeded at `until_s` (monotonic), with what `late` makes of the number of requests that are left.
    """
    while entry.life is life and not (life.load is not None and condition(life.load)):
        if not await workers.changed(until_s=until_s):
            left = life.load.unfinished if life.load is not None else 0
            raise DeadlineExceeded(f"worker {life.description.worker_id} {late(left)}")
