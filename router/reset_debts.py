"""Resets of prefix caches that a connected worker failed: tried again until it has had them, or is gone.

A worker that comes back pays before it serves (`workers`), so only those need this that stay connected.
"""

from __future__ import annotations

import asyncio

from router.backoff import Backoff
from router.worker_entry import WorkerLife
from router.workers import WorkerTable
from twinstage.errors import TwinstageError
from twinstage.telemetry.log import get_logger
from twinstage.types import Role

RESET_TIMEOUT_S = 5.0

logger = get_logger(__name__)


async def collect_debts(workers: WorkerTable) -> None:
    """Reset those that owe it, again and again, until nobody does that is connected.

    Decode workers come after all prefill workers, from which they may take old blocks until then.
    """
    backoff = Backoff()
    while owing := _owing(workers):
        await backoff.wait()
        for role in (Role.PREFILL, Role.DECODE):
            of_role = [life for life in owing if life.description.role is role]
            if not all(await asyncio.gather(*(_pays(workers, life) for life in of_role))):
                break


def _owing(workers: WorkerTable) -> list[WorkerLife]:
    lives = [entry.life for entry in workers.entries if entry.life is not None]
    return [life for life in lives if workers.resets.owed(life.description)]


async def _pays(workers: WorkerTable, life: WorkerLife) -> bool:
    """Whether the worker owes nothing any more."""
    number = workers.resets.owed(life.description)
    try:
        await life.connection.reset_prefix_cache(timeout_s=RESET_TIMEOUT_S)
    except TwinstageError as error:
        if any(entry.life is life for entry in workers.entries):
            logger.debug("prefix cache not reset yet", worker=life.description.worker_id, error=str(error))
            return False
        return True  # it is gone, and pays when it comes back
    workers.resets.had(life.description, number)
    logger.info("prefix cache reset at last", worker=life.description.worker_id)
    return True
