"""Who a call is: its request id and its trace, known anywhere below its handler, and part of all that is logged there.

The request id is the request's own `request_id` field, else the metadata key `x-request-id`, else a new one.
"""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeGuard

import grpc
import structlog

from twinstage.telemetry.trace_context import TRACEPARENT_METADATA_KEY, continue_trace, set_current_trace

REQUEST_ID_METADATA_KEY = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128

_request_id: ContextVar[str] = ContextVar("twinstage_request_id", default="")

if TYPE_CHECKING:  # generic for the type checker only
    Context = grpc.aio.ServicerContext[Any, Any]


def current_request_id() -> str:
    """The id of the request that the present task serves; empty outside of a call."""
    return _request_id.get()


def enter_call(request: object, context: Context) -> None:
    """Give the call, which the present task serves, its request id and its trace."""
    request_id = _choose_request_id(request, context)
    _request_id.set(request_id)
    trace = continue_trace(_values(context, TRACEPARENT_METADATA_KEY))
    set_current_trace(trace)
    structlog.contextvars.bind_contextvars(request_id=request_id, trace_id=trace.trace_id)


def _choose_request_id(request: object, context: Context) -> str:
    """The caller's id if it is one that may be logged and sent back, else a new one."""
    candidates = [getattr(request, "request_id", ""), *_values(context, REQUEST_ID_METADATA_KEY)]
    return next((candidate for candidate in candidates if is_request_id(candidate)), uuid.uuid4().hex)


def _values(context: Context, key: str) -> list[str | bytes]:
    return [value for name, value in context.invocation_metadata() or () if name == key]


def is_request_id(candidate: object) -> TypeGuard[str]:
    """Whether this is 1 to 128 printable ASCII characters."""
    return (
        isinstance(candidate, str)
        and 0 < len(candidate) <= MAX_REQUEST_ID_LENGTH
        and candidate.isascii()
        and candidate.isprintable()
    )
