"""The gate: how many requests are in progress at once, and who waits.

Beyond `max_live` requests new ones wait, by priority and then in order; beyond `max_queued` they are refused at once.
A request whose turn would come too late is refused while its client still listens, with a hint when to come back,
rather than left to die at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from twinstage.errors import Draining, Overloaded

SMOOTHING = 0.1  # weight of the newest service time in the moving average
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 30.0
MAX_MARGIN_SHARE = 0.25  # of the time left, that a waiting request keeps in reserve for being served


@dataclass(order=True, slots=True)
class _Waiter:
    negative_priority: int
    order: int
    turn: asyncio.Future[None] = field(compare=False)


class Gate:
    """Hands out permits. Times are readings of `clock`, which is the event loop's own."""

    def __init__(self, *, max_live: int, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_live = max_live
        self.max_queued = max_queued
        self._clock = clock
        self._live = 0
        self._waiters: list[_Waiter] = []
        self._order = itertools.count()
        self._closed = False
        self._service_s = 0.0

    @property
    def live(self) -> int:
        return self._live

    @property
    def queued(self) -> int:
        return sum(not waiter.turn.done() for waiter in self._waiters)

    def close(self) -> None:
        """Refuse everything from now on, those that wait included."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.turn.done():
                waiter.turn.set_exception(_draining())

    @contextlib.asynccontextmanager
    async def permit(self, *, deadline_s: float, priority: int = 0) -> AsyncIterator[float]:
        """Wait for a permit, hold it for the block, and yield the seconds it took to get it.

        Raises Overloaded when the queue is full or the turn would come too late, and Draining.
        """
        waited_s = await self._enter(deadline_s=deadline_s, priority=priority)
        started_s = self._clock()
        try:
            yield waited_s
        finally:
            self._leave(self._clock() - started_s)

    async def _enter(self, *, deadline_s: float, priority: int) -> float:
        if self._closed:
            raise _draining()
        if self._live < self.max_live:
            self._live += 1
            return 0.0
        now_s, queued = self._clock(), self.queued
        if queued >= self.max_queued:
            raise self._refusal(f"{self._live} requests are in progress and {queued} wait", queued)
        ahead = sum(not w.turn.done() and w.negative_priority <= -priority for w in self._waiters)
        remaining_s = deadline_s - now_s
        if self.expected_wait_s(ahead) > remaining_s:
            raise self._refusal(f"{ahead} requests wait ahead, longer than the {remaining_s:.1f} s left", ahead)
        waiter = _Waiter(-priority, next(self._order), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        margin_s = min(self._service_s, MAX_MARGIN_SHARE * remaining_s)
        try:
            async with asyncio.timeout_at(deadline_s - margin_s):
                await waiter.turn
        except TimeoutError:
            self._give_back(waiter)
            raise self._refusal("the time left would not be enough to answer", ahead) from None
        except BaseException:
            self._give_back(waiter)
            raise
        return self._clock() - now_s

    def expected_wait_s(self, ahead: int) -> float:
        """Expected wait of a request behind `ahead` others: permits come back max_live per average service time."""
        return self._service_s * (ahead + 1) / self.max_live

    def _refusal(self, why: str, ahead: int) -> Overloaded:
        retry_after_s = min(max(self.expected_wait_s(ahead), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        return Overloaded(f"{why}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)

    def _leave(self, service_s: float) -> None:
        self._service_s += SMOOTHING * (service_s - self._service_s) if self._service_s else service_s
        self._live -= 1
        self._admit_next()

    def _give_back(self, waiter: _Waiter) -> None:
        """Leave the queue, or return the permit that came in the moment of giving up."""
        if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self._live -= 1
        waiter.turn.cancel()
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            heapq.heapify(self._waiters)
        self._admit_next()

    def _admit_next(self) -> None:
        while self._waiters and self._live < self.max_live:
            waiter = heapq.heappop(self._waiters)
            if not waiter.turn.done():
                self._live += 1
                waiter.turn.set_result(None)


def _draining() -> Draining:
    return Draining("the router is shutting down; try another one")
