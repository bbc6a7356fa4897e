"""ResetPrefixCache: every worker forgets what it computed before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from router.catalog import find_model
from router.worker_entry import WorkerEntry
from router.workers import WorkerTable
from twinstage.errors import NotFound
from twinstage.types import Role, WorkerId

RESET_TIMEOUT_S = 5.0


async def reset_prefix_caches(
    workers: WorkerTable, *, model: str = "", worker_id: str = ""
) -> list[tuple[WorkerId, int]]:
    """Empty the caches of the workers of `model` (default: all) or of one worker; who was told, and the blocks dropped.

    Prefill workers come first: a decode worker caches only what it granted after its own reset, and for that a prefill
    worker finds nothing old any more. A worker that is lost is told when it comes back, before it serves.

    Raises NotFound, or what a worker that is connected failed with.
    """
    entries = _chosen(workers, model=model, worker_id=worker_id)
    workers.prefixes.clear()  # of the others, too: they will be learned again
    dropped: list[tuple[WorkerId, int]] = []
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [entry for entry in entries if entry.description is not None and entry.description.role is role]
        answers = await asyncio.gather(*(_reset(entry) for entry in of_role), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            if answer is not None:
                dropped.append(answer)
    return sorted(dropped)


def _chosen(workers: WorkerTable, *, model: str, worker_id: str) -> Sequence[WorkerEntry]:
    if model:
        find_model(workers.models, model, task=None)
    chosen = [
        entry
        for entry in workers.entries
        if entry.description is not None
        and model in ("", entry.description.model.name)
        and worker_id in ("", entry.description.worker_id)
    ]
    if worker_id and not chosen:
        raise NotFound(f"there is no such worker as {worker_id!r}", resource_type="worker", resource_name=worker_id)
    return chosen


async def _reset(entry: WorkerEntry) -> tuple[WorkerId, int] | None:
    """The worker and the blocks it dropped; None when it is not there now."""
    entry.owes_reset = True
    life = entry.life
    if life is None:
        return None
    dropped = await life.connection.reset_prefix_cache(timeout_s=RESET_TIMEOUT_S)
    entry.owes_reset = False
    return life.description.worker_id, dropped
