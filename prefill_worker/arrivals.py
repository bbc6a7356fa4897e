"""Calls that have reached a prefill worker and not yet brought all that it needs to compute them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from twinstage.hosting.door import Door


class Arrivals:
    """Calls whose grant is on its way, while the decode worker has no blocks for them. Belongs to one event loop.

    They hold their prompts, so they count as requests of the worker. They do not count as what it has begun: when its
    door closes they end, as another worker can take them at no cost.
    """

    def __init__(self, door: Door, *, enter: Callable[[], None], on_change: Callable[[], None]) -> None:
        """`enter` raises when there is no room for one more; `on_change` hears that one came or went."""
        self._door = door
        self._enter = enter
        self._on_change = on_change
        self._scopes: set[asyncio.Timeout] = set()

    def __len__(self) -> int:
        return len(self._scopes)

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """A block in which a call waits for its messages. Raises Draining when the door is or gets closed."""
        self._enter()
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                self._on_change()
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    self._on_change()
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._door.refusal() from None

    def end_all(self) -> None:
        """The door is closed: let all that wait end."""
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
