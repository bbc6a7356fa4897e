"""How late this process itself is: on a busy machine, what looks like a slow service may be a slow observer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_INTERVAL_S = 0.05
_WORTH_NOTING_S = 0.1


class Lag:
    """Watches the event loop while `watching`."""

    def __init__(self) -> None:
        self._noted: list[tuple[float, float]] = []  # when the loop ran again, and how late it was

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def total_s(self, began_s: float, ended_s: float) -> float:
        """Time that the loop lost between two readings of the monotonic clock."""
        return sum(late_s for at_s, late_s in self._noted if began_s <= at_s and at_s - late_s <= ended_s)

    @property
    def longest_s(self) -> float:
        return max((late_s for _, late_s in self._noted), default=0.0)

    async def _watch(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s, time.monotonic() - _INTERVAL_S) + _INTERVAL_S
            await asyncio.sleep(due_s - time.monotonic())
            late_s = time.monotonic() - due_s
            if late_s > _WORTH_NOTING_S:
                self._noted.append((time.monotonic(), late_s))
