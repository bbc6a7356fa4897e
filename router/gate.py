"""The gate: how many requests are in progress at once, and who waits.

Beyond `max_live` requests new ones wait, by priority and then in order; beyond `max_queued` they are refused at once.
A request that could not be answered in time because of the others is refused while its client still listens, with a
hint when to come back, rather than left to die at its deadline. It is judged on arrival, and again when its turn comes:

    expected wait (what waits ahead, and how long requests take)  +  expected service (`service_times`), with a margin

No request is refused for being slow by itself: with nothing else in progress everything is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field

from router.service_times import ServiceTimes
from twinstage.errors import Draining, Overloaded

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 30.0
SERVICE_MARGIN = 1.25  # requests differ: so much longer than expected one may take and still be in time
CUT_SHORT_SHARE = 0.9  # who fails after so much of its time was cut short by its deadline, on whichever side,
CUT_SHORT_FACTOR = 2.0  # and is taken to have needed so much longer: nobody knows
MIN_ANSWER_SHARE = 0.05  # of the time left on arrival: who has not been let in by then is refused, not left to time out


@dataclass(order=True, slots=True)
class _Waiter:
    negative_priority: int
    order: int
    turn: asyncio.Future[None] = field(compare=False)
    deadline_s: float = field(compare=False)
    kind: Hashable = field(compare=False)


class Gate:
    """Hands out permits. Times are readings of `clock`, which is the event loop's own.

    `max_live` may be a function, for a limit that follows the workers; call `admit_waiting` when it may have grown.
    """

    def __init__(
        self, *, max_live: int | Callable[[], int], max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_live = max_live
        self.max_queued = max_queued
        self._clock = clock
        self._live = 0
        self._served_s, self._changed_s = 0.0, clock()  # see `_served_until_now_s`
        self._waiters: list[_Waiter] = []
        self._order = itertools.count()
        self._closed = False
        self._times = ServiceTimes()

    @property
    def max_live(self) -> int:
        return self._max_live() if callable(self._max_live) else self._max_live

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
    async def permit(self, *, deadline_s: float, priority: int = 0, kind: Hashable = None) -> AsyncIterator[float]:
        """Wait for a permit, hold it for the block, and yield the seconds it took to get it.

        `kind` says which requests take about as long as this one. Raises Overloaded when the queue is full or the
        answer would come too late, and Draining.
        """
        waited_s = await self._enter(deadline_s=deadline_s, priority=priority, kind=kind)
        started_s, served_at_start_s, completed = self._clock(), self._served_until_now_s(), False
        try:
            yield waited_s
            completed = True
        finally:
            self._learn(kind, started_s, served_at_start_s, deadline_s=deadline_s, completed=completed)
            self._change_live(-1)
            self.admit_waiting()

    def _learn(
        self, kind: Hashable, started_s: float, served_at_start_s: float, *, deadline_s: float, completed: bool
    ) -> None:
        service_s = self._clock() - started_s
        concurrency = (self._served_until_now_s() - served_at_start_s) / service_s if service_s > 0 else self._live
        if completed:
            self._times.learn(kind, service_s, concurrency=concurrency)
        elif service_s >= CUT_SHORT_SHARE * (deadline_s - started_s):
            known_s = self._times.expected_s(kind, concurrency=concurrency)
            self._times.learn(kind, max(known_s, CUT_SHORT_FACTOR * service_s), concurrency=concurrency)
        # Any other error, or a client that went away early, says nothing about how long requests take.

    def _change_live(self, change: int) -> None:
        self._served_s, self._changed_s = self._served_until_now_s(), self._clock()
        self._live += change

    def _served_until_now_s(self) -> float:
        """Seconds of service of all requests together: two served side by side for a second are two."""
        return self._served_s + self._live * (self._clock() - self._changed_s)

    def admit_waiting(self) -> None:
        """Let in those that wait, as far as there is room."""
        while self._waiters and self._live < self.max_live:
            waiter = heapq.heappop(self._waiters)
            if waiter.turn.done():
                continue
            if (refusal := self._refusal_if_late(waiter.kind, waiter.deadline_s - self._clock())) is not None:
                waiter.turn.set_exception(refusal)
                continue
            self._change_live(1)
            waiter.turn.set_result(None)

    def expected_wait_s(self, ahead: int) -> float:
        """Expected wait of a request behind `ahead` others: permits come back max_live per average service time."""
        return self._times.mean_s * (ahead + 1) / self.max_live

    async def _enter(self, *, deadline_s: float, priority: int, kind: Hashable) -> float:
        if self._closed:
            raise _draining()
        now_s = self._clock()
        remaining_s = deadline_s - now_s
        if self._live < self.max_live:
            if (refusal := self._refusal_if_late(kind, remaining_s)) is not None:
                raise refusal
            self._change_live(1)
            return 0.0
        queued = self.queued
        if queued >= self.max_queued:
            raise _overloaded(
                f"too many requests: {self._live} in progress, {queued} waiting", self.expected_wait_s(queued)
            )
        ahead = sum(not w.turn.done() and w.negative_priority <= -priority for w in self._waiters)
        if (refusal := self._refusal_if_late(kind, remaining_s, wait_s=self.expected_wait_s(ahead))) is not None:
            raise refusal
        waiter = _Waiter(-priority, next(self._order), asyncio.get_running_loop().create_future(), deadline_s, kind)
        heapq.heappush(self._waiters, waiter)
        try:
            async with asyncio.timeout_at(deadline_s - MIN_ANSWER_SHARE * remaining_s):
                await waiter.turn
        except TimeoutError:
            self._give_back(waiter)
            raise _overloaded("other requests took all of the time there was", self.expected_wait_s(ahead)) from None
        except BaseException:
            self._give_back(waiter)
            raise
        return self._clock() - now_s

    def _refusal_if_late(self, kind: Hashable, remaining_s: float, *, wait_s: float = 0.0) -> Overloaded | None:
        """The refusal of a request that the others would make late; None when there is time, or no telling."""
        if self._live == 0:
            return None
        concurrency = min(self._live + 1, self.max_live)
        needed_s = wait_s + SERVICE_MARGIN * self._times.expected_s(kind, concurrency=concurrency)
        if needed_s == 0 or needed_s <= remaining_s:
            return None
        why = (
            f"beside the {self._live} in progress this request takes {needed_s:.1f} s, and {remaining_s:.1f} s are left"
        )
        return _overloaded(why, max(wait_s, needed_s - remaining_s))

    def _give_back(self, waiter: _Waiter) -> None:
        """Leave the queue, or return the permit that came in the moment of giving up."""
        if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self._change_live(-1)
        waiter.turn.cancel()
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            heapq.heapify(self._waiters)
        self.admit_waiting()


def _overloaded(why: str, retry_after_s: float) -> Overloaded:
    retry_after_s = min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    return Overloaded(f"{why}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)


def _draining() -> Draining:
    return Draining("the router is shutting down; try another one")
