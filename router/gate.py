"""The gate: how many requests are in progress at once, and who waits.

Beyond `max_live` requests new ones wait: by priority, fairly between callers, then in order (`fair_queue`). A call of
several continuations counts as so many requests, but as a quarter of the limit at most: it is let in as soon as there
is any room, so the limit may be exceeded by that. Beyond `max_queued` one of them is refused at once: the newcomer, or
one of a caller that uses more of the queue.
A request that could not be answered in time because of the others is refused while its client still listens, with a
hint when to come back, rather than left to die at its deadline; so is one that would wait longer than `max_wait_s`. It
is judged on arrival, and again when its turn comes:

    expected wait (what waits ahead, and how long requests take)  +  expected service (`service_times`), with a margin

No request is refused for being slow by itself: with nothing else in progress everything is let in.
A gate that has just opened knows nothing of that. Until the first request was served it lets in fewer, takes those in
progress to need as long as they have taken, and with the first that is learned of a kind it judges all that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from dataclasses import dataclass

from router.fair_queue import FairQueue, Waiter
from router.service_times import ServiceTimes, Underway
from twinstage.errors import Draining, Overloaded, TwinstageError

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 30.0
SERVICE_MARGIN = 1.25  # requests differ: so much longer than expected one may take and still be in time
CUT_SHORT_SHARE = 0.9  # who fails after so much of its time was cut short by its deadline, on whichever side,
CUT_SHORT_FACTOR = 2.0  # and is taken to have needed so much longer: nobody knows
LARGEST_SHARE = 4  # a call counts as one part in so many of the limit at most
MIN_ANSWER_SHARE = 0.05  # of the time left on arrival: who has not been let in by then is refused, not left to time out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What a waiter is about."""

    turn: asyncio.Future[None]
    deadline_s: float
    kind: Hashable


_Waiter = Waiter[_Entry]


class Gate:
    """Hands out permits. Times are readings of `clock`, which is the event loop's own.

    `max_live` may be a function, for a limit that follows the workers; call `admit_waiting` when it may have grown.
    `first_live` is the limit until the first request was served.
    `weights` are the shares of callers, 1 for those that are not named.
    """

    def __init__(
        self,
        *,
        max_live: int | Callable[[], int],
        max_queued: int,
        max_wait_s: float = math.inf,
        weights: Mapping[str, float] | None = None,
        first_live: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_live = max_live
        self._first_live = first_live
        self.max_queued = max_queued
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._live = 0
        self._served_s, self._changed_s = 0.0, clock()  # see `_served_until_now_s`
        self._queue: FairQueue[_Entry] = FairQueue(weights)
        self._closed = False
        self._times = ServiceTimes()
        self._underway = Underway()

    @property
    def max_live(self) -> int:
        most = self._max_live() if callable(self._max_live) else self._max_live
        return most if self._first_live is None or self._times.mean_s else min(most, self._first_live())

    @property
    def live(self) -> int:
        return self._live

    @property
    def queued(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Refuse everything from now on, those that wait included."""
        self._closed = True
        for waiter in tuple(self._queue):
            self._queue.remove(waiter)
            _refuse(waiter, _draining())

    @contextlib.asynccontextmanager
    async def permit(
        self, *, deadline_s: float, caller: str = "", priority: int = 0, kind: Hashable = None, size: int = 1
    ) -> AsyncIterator[float]:
        """Wait for a permit, hold it for the block, and yield the seconds it took to get it.

        `kind` says which requests take about as long as this one, `size` as how many it counts. Raises Overloaded when
        the queue is full or the answer would come too late, and Draining.
        """
        if size > 1:
            size = min(size, max(1, self.max_live // LARGEST_SHARE))
        waited_s = await self._enter(deadline_s=deadline_s, caller=caller, priority=priority, kind=kind, size=size)
        started_s, served_at_start_s, completed = self._clock(), self._served_until_now_s(), False
        is_new = not self._times.knows(kind)
        if is_new:
            self._underway.began(kind, started_s)
        try:
            yield waited_s
            completed = True
        finally:
            self._learn(kind, started_s, served_at_start_s, deadline_s=deadline_s, completed=completed)
            self._return(caller, size)
            if is_new:
                self._underway.ended(kind, started_s)
                if self._times.knows(kind):
                    self._judge_waiting()
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

    def _take(self, caller: str, size: int) -> None:
        self._change_live(size)
        self._queue.took(caller, size)

    def _return(self, caller: str, size: int) -> None:
        self._change_live(-size)
        self._queue.gave_back(caller, size)

    def _change_live(self, change: int) -> None:
        self._served_s, self._changed_s = self._served_until_now_s(), self._clock()
        self._live += change

    def _served_until_now_s(self) -> float:
        """Seconds of service of all requests together: two served side by side for a second are two."""
        return self._served_s + self._live * (self._clock() - self._changed_s)

    def admit_waiting(self) -> None:
        """Let in those that wait, as far as there is room."""
        while self._live < self.max_live:
            now_s = self._clock()
            if (waiter := self._queue.pop(now_s=now_s)) is None:
                return
            entry = waiter.item
            if entry.turn.done():
                continue  # cancelled a moment ago
            if (refusal := self._refusal_if_late(entry.kind, entry.deadline_s - now_s)) is not None:
                _refuse(waiter, refusal)
            else:
                self._take(waiter.caller, waiter.size)
                entry.turn.set_result(None)

    def expected_wait_s(self, ahead: int) -> float:
        """Expected wait of a request behind `ahead` others: permits come back max_live per average service time."""
        mean_s = self._times.mean_s or self._underway.mean_age_s(self._clock())
        return mean_s * (ahead + 1) / self.max_live

    def _judge_waiting(self) -> None:
        """Refuse those that will be late, as far as that is sure: at least their caller's own are before them."""
        now_s = self._clock()
        ahead: Counter[tuple[str, int]] = Counter()
        room = max(0, self.max_live - self._live)
        for waiter in tuple(self._queue):
            place, entry = (waiter.caller, waiter.priority), waiter.item
            wait_s = self.expected_wait_s(ahead[place] - room) if ahead[place] >= room else 0.0
            if (refusal := self._refusal_if_late(entry.kind, entry.deadline_s - now_s, wait_s=wait_s)) is not None:
                self._queue.remove(waiter)
                _refuse(waiter, refusal)
            else:
                ahead[place] += waiter.size

    async def _enter(self, *, deadline_s: float, caller: str, priority: int, kind: Hashable, size: int) -> float:
        if self._closed:
            raise _draining()
        now_s = self._clock()
        remaining_s = deadline_s - now_s
        if self._live < self.max_live and not self._queue:
            if (refusal := self._refusal_if_late(kind, remaining_s)) is not None:
                raise refusal
            self._take(caller, size)
            return 0.0
        wait_s = self.expected_wait_s(self._queue.num_ahead(caller, priority))
        wait_s = min(wait_s, self._queue.longest_wait_s(caller, priority))
        if wait_s > self._max_wait_s:
            why = f"a place would take {wait_s:.1f} s, and nobody waits longer than {self._max_wait_s:.1f} s"
            raise _overloaded(why, wait_s - self._max_wait_s)
        if (refusal := self._refusal_if_late(kind, remaining_s, wait_s=wait_s)) is not None:
            raise refusal
        entry = _Entry(turn=asyncio.get_running_loop().create_future(), deadline_s=deadline_s, kind=kind)
        waiter = self._queue_up(Waiter(caller=caller, priority=priority, item=entry, size=size), now_s=now_s)
        patience_s = min((1 - MIN_ANSWER_SHARE) * remaining_s, self._max_wait_s)
        await self._until_turn(waiter, until_s=now_s + patience_s, retry_after_s=wait_s)
        return self._clock() - now_s

    def _queue_up(self, waiter: _Waiter, *, now_s: float) -> _Waiter:
        """Put it into the queue. Raises Overloaded when that is full and nobody else has to leave for it."""
        if len(self._queue) >= self.max_queued:
            victim = self._queue.push_out(waiter)
            refusal = _overloaded(
                f"too many requests: {self._live} in progress, {self.max_queued} waiting",
                self.expected_wait_s(len(self._queue)),
            )
            if victim is waiter:
                raise refusal
            _refuse(victim, refusal)
        self._queue.add(waiter, now_s=now_s)
        return waiter

    async def _until_turn(self, waiter: _Waiter, *, until_s: float, retry_after_s: float) -> None:
        try:
            async with asyncio.timeout_at(until_s):
                await waiter.item.turn
        except TimeoutError:
            self._give_up(waiter)
            raise _overloaded("other requests took all of the time there was", retry_after_s) from None
        except BaseException:
            self._give_up(waiter)
            raise

    def _refusal_if_late(self, kind: Hashable, remaining_s: float, *, wait_s: float = 0.0) -> Overloaded | None:
        """The refusal of a request that the others would make late; None when there is time, or no telling."""
        if self._live == 0:
            return None
        concurrency = min(self._live + 1, self.max_live)
        expected_s = self._times.expected_s(kind, concurrency=concurrency)
        if not expected_s:
            expected_s = self._underway.age_s(kind, self._clock())
        needed_s = wait_s + SERVICE_MARGIN * expected_s
        if needed_s == 0 or needed_s <= remaining_s:
            return None
        why = (
            f"beside the {self._live} in progress this request takes {needed_s:.1f} s, and {remaining_s:.1f} s are left"
        )
        return _overloaded(why, max(wait_s, needed_s - remaining_s))

    def _give_up(self, waiter: _Waiter) -> None:
        """Leave the queue at once, or return the permit that came in the moment of giving up."""
        turn = waiter.item.turn
        if not self._queue.remove(waiter) and not turn.cancelled() and turn.exception() is None:
            self._return(waiter.caller, waiter.size)
        turn.cancel()
        self.admit_waiting()


def _refuse(waiter: _Waiter, error: TwinstageError) -> None:
    if not waiter.item.turn.done():  # its caller may have been cancelled a moment ago
        waiter.item.turn.set_exception(error)


def _overloaded(why: str, retry_after_s: float) -> Overloaded:
    retry_after_s = min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    return Overloaded(f"{why}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)


def _draining() -> Draining:
    return Draining("the router is shutting down; try another one")
