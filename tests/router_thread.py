"""A router on workers without a model, in a thread of its own: for tests with blocking clients."""

from __future__ import annotations

import asyncio
import threading

from served_router import serving


class RunningRouter:
    """Serves within its scope, which gives the port."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="router")
        self.port = 0
        self.metrics_port = 0

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(*self._flags) as service:
            self.port, self.metrics_port = service.router.port, service.router.metrics_port
            self._ready.set()
            await self._end.wait()

    def __enter__(self) -> int:
        self._thread.start()
        assert self._ready.wait(30)
        return self.port

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
