"""W3C Trace Context: which trace a call belongs to.

A caller that traces sends `traceparent`, 00-TRACE-SPAN-FLAGS in hexadecimal digits; a call without one begins a trace
of its own. All processes that take part in a request log its trace id.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT_METADATA_KEY = "traceparent"

# Later versions may append fields, which this one does not read.
_TRACEPARENT = re.compile(r"(?!ff)(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.*)?")
_MAX_CHARACTERS = 256
_SAMPLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A trace, and the span of ours in it: `span_id` is the router's, `parent_span_id` the caller's or empty."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    parent_span_id: str = ""
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """What those who are called for this span are sent."""
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


def continue_trace(values: Iterable[str | bytes]) -> TraceContext:
    """The trace of a call with these values of `traceparent`: with anything but one that can be read, a new one."""
    headers = list(values)
    parsed = _parse(headers[0]) if len(headers) == 1 else None
    span_id = new_id(8)
    if parsed is None:
        return TraceContext(trace_id=new_id(16), span_id=span_id)
    trace_id, parent_span_id, flags = parsed
    return TraceContext(
        trace_id=trace_id, span_id=span_id, parent_span_id=parent_span_id, sampled=bool(flags & _SAMPLED)
    )


def trace_id_of(traceparent: str) -> str:
    """The trace id in a `traceparent`; empty when there is none."""
    parsed = _parse(traceparent)
    return parsed[0] if parsed is not None else ""


def new_id(num_bytes: int) -> str:
    """Random hexadecimal digits, not all of them zero."""
    while not int(drawn := secrets.token_hex(num_bytes), 16):
        pass
    return drawn


def _parse(header: str | bytes) -> tuple[str, str, int] | None:
    """Trace id, span id and flags; None for what is no `traceparent`, or has an id of zeros."""
    if not isinstance(header, str) or len(header) > _MAX_CHARACTERS:
        return None
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None or (match["version"] == "00" and match["more"]):
        return None
    _, trace_id, span_id, flags, _ = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return trace_id, span_id, int(flags, 16)


_current: ContextVar[TraceContext | None] = ContextVar("twinstage_trace", default=None)


def set_current_trace(context: TraceContext) -> None:
    """Say which trace the present task works for."""
    _current.set(context)


def current_trace() -> TraceContext:
    """The trace that the present task works for; a new one outside of a call."""
    return _current.get() or continue_trace(())
