"""Sends the requests of one phase: a dispatcher waits for the next moment or free place, then starts a task.

A request's latencies count from the moment for which it was planned. When the server, a full `max_in_flight` or the
generator itself holds a request back, the wait is part of its latency and is not hidden ("coordinated omission").
In a closed loop that moment is when a place became free.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

from twinstage.bench.measure import Books
from twinstage.bench.options import LoadOptions
from twinstage.bench.plan import PlannedRequest
from twinstage.bench.target import LoadRequest, RequestFailed, Target

# A closed loop's client that was refused comes back a moment later; at once, a refusing server would only be flooded.
PAUSE_AFTER_FAILURE_S = 0.1


class Sender:
    """Sends what is planned and waits for the answers. Servers take turns."""

    def __init__(
        self,
        options: LoadOptions,
        targets: Sequence[Target],
        *,
        books: Books,
        make_request: Callable[[PlannedRequest], LoadRequest],
    ) -> None:
        self._options = options
        self._targets = itertools.cycle(targets)
        self._books = books
        self._make_request = make_request
        places = options.concurrency or options.max_in_flight
        self._places = asyncio.Semaphore(places) if places is not None else None
        self._end_s = None if options.duration_s is None else books.start_s + options.duration_s

    async def run(self, planned: Iterator[PlannedRequest], stop: asyncio.Event) -> None:
        """Until everything is answered, or `stop` is set. Raises what is no failure of a request but a bug."""
        if stop.is_set():
            return
        working = asyncio.create_task(self._send_all(planned), name="load")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(stopping, working, return_exceptions=True)
        if not working.cancelled():
            working.result()

    async def _send_all(self, planned: Iterator[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for entry in planned:
                request = self._make_request(entry)  # before its moment, so that it is not late for that
                scheduled_s = await self._moment(entry)
                if scheduled_s is None:
                    break
                group.create_task(self._send(request, entry, scheduled_s=scheduled_s))
            self._books.end_sending()

    async def _moment(self, entry: PlannedRequest) -> float | None:
        """Wait until the request may be sent; the moment from which it counts, None when the time is over.

        What an open loop planned within its duration is sent even if places became free only later.
        """
        if entry.offset_s is None:
            try:
                async with asyncio.timeout_at(self._end_s):
                    await self._take_place()
            except TimeoutError:
                return None
            return self._books.clock()
        scheduled_s = self._books.start_s + entry.offset_s
        is_over = self._end_s is not None and scheduled_s >= self._end_s
        if is_over:
            return None
        await asyncio.sleep(max(0.0, scheduled_s - self._books.clock()))
        await self._take_place()
        return scheduled_s

    async def _take_place(self) -> None:
        if self._places is not None:
            await self._places.acquire()

    async def _send(self, request: LoadRequest, entry: PlannedRequest, *, scheduled_s: float) -> None:
        track = self._books.begin(
            scheduled_s=scheduled_s, prompt_tokens=entry.prompt_tokens, was_capped=entry.was_capped
        )
        try:
            answer = await next(self._targets).send(request, track)
        except RequestFailed as error:
            self._books.fail(track, error)
            if self._options.is_closed:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
        except asyncio.CancelledError:
            self._books.cancel(track)
            raise
        else:
            self._books.succeed(track, answer)
        finally:
            if self._places is not None:
                self._places.release()
