"""The requests that are in progress, by id: no two share an id, and an operator may end one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from router.trace import RequestTrace, Traces
from twinstage.errors import AlreadyExists, NotFound


class LiveRequest:
    """One request in progress, and the switch that ends it softly."""

    def __init__(self, trace: RequestTrace) -> None:
        self.request_id = trace.request_id
        self.trace = trace
        self.aborted = False
        self._scopes: set[asyncio.Timeout] = set()

    def abort(self) -> None:
        """End the request's present `interruptible` blocks, and those to come, with TimeoutError."""
        self.aborted = True
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def interruptible(self, until_s: float | None = None) -> AsyncIterator[None]:
        """A block that ends with TimeoutError at `until_s` of the loop's clock or when the request is aborted."""
        async with asyncio.timeout_at(0.0 if self.aborted else until_s) as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


class LiveRequests:
    """All requests in progress, and the traces of these and of the last ones."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces or Traces()
        self._requests: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @contextlib.contextmanager
    def register(self, request_id: str) -> Iterator[LiveRequest]:
        """Hold `request_id` for as long as the block lasts. Raises AlreadyExists."""
        if request_id in self._requests:
            raise AlreadyExists(
                f"a request with the id {request_id!r} is in progress; choose another id or leave it out",
                resource_type="request",
                resource_name=request_id,
            )
        live = LiveRequest(self.traces.begin(request_id))
        self._requests[request_id] = live
        self._idle.clear()
        try:
            yield live
        finally:
            del self._requests[request_id]
            self.traces.end(live.trace)
            if not self._requests:
                self._idle.set()

    def abort(self, request_id: str) -> None:
        """End a request softly. Raises NotFound."""
        live = self._requests.get(request_id)
        if live is None:
            raise NotFound(
                f"no request with the id {request_id!r} is in progress",
                resource_type="request",
                resource_name=request_id,
            )
        live.abort()

    async def wait_idle(self) -> None:
        """Return when no request is in progress."""
        await self._idle.wait()
