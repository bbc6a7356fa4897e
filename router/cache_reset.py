"""ResetPrefixCache: every worker forgets what it computed before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from router.reset_book import Scope
from router.reset_debts import RESET_TIMEOUT_S, collect_debts
from router.worker_entry import WorkerLife
from router.workers import WorkerTable
from twinstage.errors import NotFound, TwinstageError, Unavailable, WorkerLost
from twinstage.telemetry.log import get_logger
from twinstage.types import Role, WorkerId

logger = get_logger(__name__)


async def reset_prefix_caches(
    workers: WorkerTable, *, model: str = "", worker_id: str = ""
) -> list[tuple[WorkerId, int]]:
    """Empty the caches of the workers of `model` (default: all) or of one worker; who was told, and the blocks dropped.

    Prefill workers come first: a decode worker caches only what it granted after its own reset, and for that a prefill
    worker finds nothing old any more. Whoever is not connected now is told when it is, before it serves; this router
    remembers that for as long as it runs.

    Raises NotFound, and Unavailable that names those which are connected and failed. All others were told then; those
    go on serving with what they have, and are told again until they have forgotten it or are gone.
    """
    lives = _chosen(workers, model=model, worker_id=worker_id)
    workers.resets.ask(Scope(model=model, worker_id=worker_id))  # no await since: who connects now sees it
    workers.prefixes.clear()  # of the others, too: they will be learned again
    dropped: list[tuple[WorkerId, int]] = []
    failures: dict[WorkerId, TwinstageError] = {}
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [life for life in lives if life.description.role is role]
        # A decode worker may yet take old blocks from a prefill worker that failed, so it owes its reset all the same.
        settles = not failures
        resets = (_reset(workers, life, settles=settles) for life in of_role)
        for life, answer in zip(of_role, await asyncio.gather(*resets, return_exceptions=True), strict=True):
            if isinstance(answer, TwinstageError):
                failures[life.description.worker_id] = answer
                logger.warning("prefix cache not reset", worker=life.description.worker_id, error=str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                dropped.append(answer)
    if failures:
        workers.beside("collect resets", partial(collect_debts, workers))
        raise _not_all(failures, num_told=len(dropped))
    return sorted(dropped)


def _not_all(failures: Mapping[WorkerId, TwinstageError], *, num_told: int) -> Unavailable:
    failed = "; ".join(f"{worker_id} ({error})" for worker_id, error in sorted(failures.items()))
    return Unavailable(
        f"{len(failures)} of {len(failures) + num_told} workers have not forgotten yet: {failed}; "
        "the router tells them again until they have, or are gone"
    )


def _chosen(workers: WorkerTable, *, model: str, worker_id: str) -> Sequence[WorkerLife]:
    """The connected ones of the workers that are asked for, of which at least one must be known by its name."""
    if model:
        workers.find_model(model, work=None)
    scope = Scope(model=model, worker_id=worker_id)
    known = [entry for entry in workers.entries if entry.description is not None and scope.covers(entry.description)]
    if worker_id and not known:
        raise NotFound(f"there is no such worker as {worker_id!r}", resource_type="worker", resource_name=worker_id)
    return [entry.life for entry in known if entry.life is not None]


async def _reset(workers: WorkerTable, life: WorkerLife, *, settles: bool) -> tuple[WorkerId, int] | None:
    """The worker and the blocks it dropped; None when it was lost meanwhile, and so owes the reset.

    `settles`: whether it owes nothing any more afterwards.
    """
    number = workers.resets.owed(life.description)
    try:
        dropped = await life.connection.reset_prefix_cache(timeout_s=RESET_TIMEOUT_S)
    except WorkerLost:
        if any(entry.life is life for entry in workers.entries):
            raise
        return None
    if settles:
        workers.resets.had(life.description, number)
    return life.description.worker_id, dropped
