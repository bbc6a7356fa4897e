"""Requests that wait for KV blocks, woken by blocks that come back.

They are served by rank: first come, first served, where each level of priority counts as a head start, so that nobody
waits for ever behind others. One that is large and does not fit yet lets smaller ones pass that do, but no more of them
than take as many blocks as it wants itself: small requests neither wait behind it nor starve it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinstage.errors import DeadlineExceeded, InternalError, KvExhausted, TwinstageError
from twinstage.kv.block_pool import BlockPool, BlockTable
from twinstage.kv.prefix_index import HashChain
from twinstage.kv.shortage import Shortage
from twinstage.telemetry.log import get_logger
from twinstage.types import SECONDS_PER_PRIORITY_LEVEL, RequestId

MAX_WAITING = 1024
MAX_PASSED = 16  # requests that do not fit, which one that does may pass; each is looked at when blocks come back

logger = get_logger(__name__)

Reserved = TypeVar("Reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Who wants blocks, and how many; `owner` is the name they get in the pool's books.

    `hashes` name what the leading ones shall hold: those that the worker has already are shared.
    """

    request_id: RequestId
    session_id: str
    owner: RequestId
    num_blocks: int
    hashes: HashChain | None = None
    priority: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter(Generic[Reserved]):
    wish: Wish
    use: Callable[[BlockTable], Reserved]
    result: asyncio.Future[Reserved]
    rank: tuple[float, int]  # smaller is served first
    shortage: Shortage | None = None  # why it still waits
    passed_by_blocks: int = 0  # given to others of worse rank meanwhile

    def lets_pass(self, num_blocks: int) -> bool:
        return self.passed_by_blocks + num_blocks <= self.wish.num_blocks


class Reservations(Generic[Reserved]):
    """Takes blocks from the pool for new requests. Belongs to one event loop.

    `may_take` says whether new requests get blocks now, and `headroom` how many blocks must stay free for sequences
    that run already; so a full worker finishes what it has before it takes more. `give_up` undoes a reservation whose
    caller went away in the moment in which it was made. `on_change` hears that another number of requests waits.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        may_take: Callable[[], bool],
        headroom: Callable[[], int],
        give_up: Callable[[Reserved], None],
        on_change: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._may_take = may_take
        self._headroom = headroom
        self._give_up = give_up
        self._on_change = on_change
        self._waiters: list[_Waiter[Reserved]] = []  # by rank
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(self, wish: Wish, use: Callable[[BlockTable], Reserved], *, timeout_s: float) -> Reserved:
        """What `use` makes of the blocks; it is called as soon as it is this request's turn and they are free.

        Raises DeadlineExceeded after `timeout_s`, KvExhausted when too many wait, what `refuse` was called with, or
        the TwinstageError of `use`, which leaves the blocks to be freed here; its other exceptions are InternalError.
        """
        if len(self._waiters) >= MAX_WAITING:
            raise KvExhausted(f"the KV pool is full and {MAX_WAITING} requests wait for it")
        result: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        rank = (time.monotonic() - SECONDS_PER_PRIORITY_LEVEL * wish.priority, next(self._numbers))
        waiter = _Waiter(wish=wish, use=use, result=result, rank=rank)
        insort(self._waiters, waiter, key=lambda waiter: waiter.rank)
        self._on_change()
        self.serve()
        if result.done():
            return result.result()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([result])
        except TimeoutError as error:
            self._abandon(waiter)
            raise DeadlineExceeded(f"no {wish.num_blocks} KV blocks became free within {timeout_s:.3f} s") from error
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        return result.result()

    def serve(self) -> None:
        """Give blocks to those who wait, by rank, as far as the pool allows."""
        passed: list[_Waiter[Reserved]] = []
        for waiter in tuple(self._waiters):
            if len(passed) > MAX_PASSED or not self._may_take():
                return
            if waiter.result.done():
                continue
            if not all(other.lets_pass(waiter.wish.num_blocks) for other in passed):
                continue
            if (table := self._allocate(waiter)) is None:
                passed.append(waiter)
                if not waiter.lets_pass(1):
                    return
                continue
            for other in passed:
                other.passed_by_blocks += max(1, len(table) - table.num_shared)
            self._give(waiter, table)

    def _allocate(self, waiter: _Waiter[Reserved]) -> BlockTable | None:
        """The blocks of a waiter; None when it must wait. What was in vain is tried again when the pool has changed."""
        wish, keep_free = waiter.wish, self._headroom()
        if waiter.shortage is not None and not waiter.shortage.may_be_over(self._pool, keep_free=keep_free):
            return None
        prefix = wish.hashes.hashes if wish.hashes is not None else ()
        changes = self._pool.changes
        try:
            return self._pool.allocate(wish.num_blocks, owner=wish.owner, keep_free=keep_free, prefix=prefix)
        except KvExhausted:
            waiter.shortage = Shortage(changes=changes, keep_free=keep_free)
            return None

    def _give(self, waiter: _Waiter[Reserved], table: BlockTable) -> None:
        self._waiters.remove(waiter)
        try:
            waiter.result.set_result(waiter.use(table))
        except TwinstageError as error:
            table.release()
            waiter.result.set_exception(error)
        except Exception:  # a bug of `use`: it fails this request, and not those whose turn comes after it
            logger.exception("kv blocks could not be taken over", request_id=waiter.wish.request_id)
            table.release()
            waiter.result.set_exception(InternalError("the decode worker could not take the KV blocks over"))
        self._on_change()

    def refuse(
        self, error: TwinstageError, *, session_id: str | None = None, request_id: RequestId | None = None
    ) -> None:
        """Fail those who wait: all of them, those of one session, or one request of it."""
        kept: list[_Waiter[Reserved]] = []
        for waiter in self._waiters:
            if session_id in (None, waiter.wish.session_id) and request_id in (None, waiter.wish.request_id):
                waiter.result.set_exception(error)
            else:
                kept.append(waiter)
        if len(kept) < len(self._waiters):
            self._waiters = kept
            self._on_change()
            self.serve()  # a smaller request may have waited behind them

    def _abandon(self, waiter: _Waiter[Reserved]) -> None:
        """The caller has gone."""
        if not waiter.result.done():
            self._waiters.remove(waiter)
            self._on_change()
            self.serve()
        elif waiter.result.exception() is None:
            self._give_up(waiter.result.result())
