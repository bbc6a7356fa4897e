"""Threads for work on text that is no generation: tokenizing and rendering on request.

They are not the ones that admission uses, so calls of TokenizerService never hold up a generation; and no more work is
taken than they will soon get to. Work goes on after its caller has left, and counts until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from twinstage.errors import Overloaded

Result = TypeVar("Result")

MAX_PENDING_PER_THREAD = 32


class TextThreads:
    """A few threads with a short queue."""

    def __init__(self, threads: int) -> None:
        self._executor: Executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._max_pending = threads * MAX_PENDING_PER_THREAD
        self._pending = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises Overloaded when too much waits already."""
        if self._pending >= self._max_pending:
            raise Overloaded(f"{self._pending} calls of TokenizerService are in progress; try again")
        loop = asyncio.get_running_loop()
        future = self._executor.submit(work)
        self._pending += 1
        future.add_done_callback(lambda _: _call_soon(loop, self._one_less))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _one_less(self) -> None:
        self._pending -= 1


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():  # work that outlives the router
        loop.call_soon_threadsafe(callback)
