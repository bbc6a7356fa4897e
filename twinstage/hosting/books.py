"""The books of KV blocks while a worker serves: what is held by nobody it knows, and whether everything adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from twinstage.errors import IntegrityError
from twinstage.kv.block_pool import BlockPool
from twinstage.telemetry.log import get_logger

CHECK_INTERVAL_S = 30.0

logger = get_logger(__name__)


class Leaks:
    """Counts the blocks that are held in the name of requests which a worker does not know.

    Every holding is in somebody's name from before the blocks are taken until after they are given back: a sequence's,
    a reservation's, or that of a request which ended while somebody may still touch its blocks (quarantine). So the
    count is exact at any time, not only when nothing runs.
    """

    def __init__(self, pool: BlockPool, *, knows: Callable[[str], bool]) -> None:
        self._pool = pool
        self._knows = knows
        self._reported = 0

    def count(self) -> int:
        """Blocks, a shared one for each such holder; a number that is new is logged as an error."""
        strays = {owner: held for owner, held in self._pool.owners().items() if held and not self._knows(owner)}
        count = sum(strays.values())
        if count > self._reported:
            logger.error("kv blocks leaked", blocks=count, owners=strays)
        self._reported = count
        return count


class Checked(Protocol):
    """The part of a worker that is needed to check its books."""

    async def wait_idle(self) -> None: ...

    def check_books(self) -> None:
        """Raise IntegrityError unless the books of KV blocks balance."""

    def begin_drain(self, *, fault: str) -> None: ...


async def keep_checking(worker: Checked, *, interval_s: float = CHECK_INTERVAL_S) -> None:
    """Check the books when the worker is idle, at most once an interval, for about a microsecond a block.

    A worker whose books do not balance could give one block to two requests: it takes nothing new any more, whoever
    asks it to, until it is restarted. Returns then.
    """
    while True:
        await asyncio.sleep(interval_s)
        await worker.wait_idle()
        try:
            await asyncio.to_thread(worker.check_books)
        except IntegrityError as error:
            logger.error("the block pool's books do not balance, so the worker drains", error=str(error))
            worker.begin_drain(fault="its books of KV blocks do not balance")
            return
        except Exception:  # a bug in the check says nothing about the books, and must not be the last check
            logger.exception("the block pool's books could not be checked")
