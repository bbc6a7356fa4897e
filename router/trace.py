"""Traces: what was done for each request, in which process and when.

Workers tell the router how long their parts took, with their events; the router places each part in time by when it
heard of it. Nothing here waits or computes, and a request adds a dozen small objects at most for each attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from twinstage.errors import (
    AlreadyExists,
    Cancelled,
    InternalError,
    NotFound,
    PermissionDenied,
    TwinstageError,
    Unauthenticated,
)
from twinstage.telemetry.trace_context import TraceContext, current_trace

MAX_ENDED = 1000  # traces that are kept after their requests have ended
MAX_SPANS = 100  # of one trace; a request is tried a few times, and has a handful of them each time
ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that was done. Seconds from the arrival of the request; a moment has a duration of 0."""

    name: str
    process: str
    start_s: float
    duration_s: float
    attempt: int = 0
    error: str = ""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """The way of one request. Spans are added when they have ended."""

    request_id: str
    context: TraceContext
    model: str = ""
    error_reason: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
    arrived_at_s: float = field(default_factory=time.time)  # since the epoch
    duration_s: float | None = None  # None while the request is in progress
    spans: list[TraceSpan] = field(default_factory=list)

    def ended_now(
        self,
        name: str,
        duration_s: float,
        *,
        process: str = ROUTER,
        attempt: int = 0,
        error: str = "",
        ago_s: float = 0,
    ) -> None:
        """Add a span that took `duration_s` and ended `ago_s` before now, as far as can be told.

        Clocks of other machines run a little differently: a span lies within the request whatever they say.
        """
        if len(self.spans) >= MAX_SPANS or self.duration_s is not None:
            return
        end_s = max(0.0, time.monotonic() - self.arrived_s - ago_s)
        start_s = min(max(0.0, end_s - duration_s), end_s)
        self.spans.append(
            TraceSpan(
                name=name,
                process=process,
                start_s=start_s,
                duration_s=end_s - start_s,
                attempt=attempt,
                error=error,
            )
        )

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A scope whose error, if any, is why the request failed."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            self.error_reason = reason_of(error)
            raise

    def end(self) -> None:
        """The request is over; nothing is added any more."""
        if self.duration_s is None:
            self.duration_s = time.monotonic() - self.arrived_s


class Traces:
    """The traces of all requests in progress, and of the last `max_ended` that ended or were refused."""

    def __init__(self, max_ended: int = MAX_ENDED, on_end: Callable[[RequestTrace], None] = lambda trace: None) -> None:
        """`on_end` is told of each trace whose request has ended."""
        self._max_ended = max_ended
        self._on_end = on_end
        self._live: dict[str, RequestTrace] = {}
        self._ended: OrderedDict[str, RequestTrace] = OrderedDict()

    def begin(self, request_id: str) -> RequestTrace:
        """The trace of a request that begins now, for the call that the present task serves."""
        trace = RequestTrace(request_id=request_id, context=current_trace())
        self._live[request_id] = trace
        return trace

    def end(self, trace: RequestTrace) -> None:
        """Its request is over. Of several with the same id, one after the other, the last one is remembered."""
        trace.end()
        self._live.pop(trace.request_id, None)
        self._ended[trace.request_id] = trace
        self._ended.move_to_end(trace.request_id)
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        self._on_end(trace)

    def refused(self, request_id: str, error: Exception) -> None:
        """The call that the present task serves fails with `error`; remember it unless it has a trace already.

        Whoever asks for an id that is in progress is no part of that request, and a caller without a right to be here
        displaces no trace.
        """
        known = self._live.get(request_id) or self._ended.get(request_id)
        if known is not None and (known.context is current_trace() or known.duration_s is None):
            return
        if isinstance(error, AlreadyExists | Unauthenticated | PermissionDenied):
            return
        trace = RequestTrace(request_id=request_id, context=current_trace(), error_reason=reason_of(error))
        self.end(trace)

    def find(self, request_id: str) -> RequestTrace:
        """The trace of a request. Raises NotFound."""
        trace = self._live.get(request_id) or self._ended.get(request_id)
        if trace is None:
            raise NotFound(
                f"nothing is known of a request with the id {request_id!r}: it has not been here, or too long ago",
                resource_type="request",
                resource_name=request_id,
            )
        return trace


def reason_of(error: BaseException) -> str:
    """The stable reason of any exception, as a client learns it."""
    if isinstance(error, asyncio.CancelledError):
        return Cancelled.reason
    return error.reason if isinstance(error, TwinstageError) else InternalError.reason
