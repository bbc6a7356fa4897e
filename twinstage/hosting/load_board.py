"""The load of a worker as it changes, for those who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from twinstage.hosting.books import Leaks
from twinstage.kv.block_pool import BlockPool
from twinstage.types import WorkerLoad

MIN_SPACING_S = 0.02  # an engine step may take less; nobody needs the load more often than this


def pool_load(pool: BlockPool, leaks: Leaks) -> WorkerLoad:
    """What the block pool says of a worker's load."""
    lookups = pool.prefix_lookups
    return WorkerLoad(
        free_kv_blocks=pool.num_free,
        cached_kv_blocks=pool.num_cached,
        prefix_looked_up_blocks=lookups.wanted,
        prefix_found_blocks=lookups.found,
        leaked_kv_blocks=leaks.count(),
    )


class LoadBoard:
    """Hands the present load to watchers: at once, after a change, and at least every interval.

    Belongs to one event loop. `changed()` may be called often: a watcher that has not looked yet misses nothing, as it
    reads the load when it does, and a load that is equal to the last one is not sent again before the interval ends.
    """

    def __init__(self, read: Callable[[], WorkerLoad]) -> None:
        self._read = read
        self._watchers: set[asyncio.Event] = set()
        self._ended = False

    def end(self) -> None:
        """Let every watch end, now and in future: the worker stops."""
        self._ended = True
        self.changed()

    def changed(self) -> None:
        """Wake the watchers."""
        for watcher in self._watchers:
            watcher.set()

    async def watch(self, interval_s: float) -> AsyncGenerator[WorkerLoad]:
        """The load now and from then on, until `end` is called."""
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while not self._ended:
                news.clear()
                load = self._read()
                yield load
                await self._until_news(news, load, interval_s)
        finally:
            self._watchers.discard(news)

    async def _until_news(self, news: asyncio.Event, sent: WorkerLoad, interval_s: float) -> None:
        try:
            async with asyncio.timeout(interval_s):
                await asyncio.sleep(MIN_SPACING_S)
                while self._read() == sent and not self._ended:
                    await news.wait()
                    news.clear()
        except TimeoutError:
            return
