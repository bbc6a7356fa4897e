"""How the client reaches a router, and what it makes of failed calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc

from twinstage.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    TwinstageError,
    Unavailable,
    Unimplemented,
)
from twinstage.rpc.protocol import MAX_MESSAGE_BYTES
from twinstage.rpc.status import DETAILS_METADATA_KEY, error_from_rpc

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # a router that was cut off is noticed though no token is due
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.primary_user_agent", "twinstage-python"),
)

# What a status without the router's details means: gRPC itself, or something between, made it.
_TRANSPORT_ERRORS: dict[grpc.StatusCode, type[TwinstageError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}


# How gRPC words that it could not even connect; everything else that is UNAVAILABLE happened to a call under way.
_NOT_CONNECTED = (
    "failed to connect",
    "errors resolving",
    "DNS resolution",
    "name resolution",
    "no such host",
    "Connection refused",
)


def error_of(error: grpc.RpcError, address: str, *, began: bool = False) -> TwinstageError:
    """The error that a failed call stands for, with the violations, retry time and so on that the router sent.

    `began`: part of the answer had come.
    """
    call = cast("grpc.aio.AioRpcError", error)  # errors of blocking calls have the same methods
    metadata = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())
    if any(key == DETAILS_METADATA_KEY for key, _ in metadata):
        return error_from_rpc(call)
    code, details = call.code(), call.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and (began or not any(words in details for words in _NOT_CONNECTED)):
        answer = "the answer is not complete" if began else "the request may have been served"
        return Unavailable(f"the connection to the router at {address} broke off ({details}); {answer}")
    if code is grpc.StatusCode.UNAVAILABLE:
        # It took the connection, and not what was said.
        speaks_otherwise = any(words in details for words in ("Socket closed", "Connection reset"))
        advice = "does it speak TLS?" if speaks_otherwise else "check the address, or run: twinstage serve"
        return Unavailable(f"no router answers at {address} ({details}); {advice}")
    error_class = _TRANSPORT_ERRORS.get(code, InternalError)
    return error_class(f"{address} answered {code.name}" + (f": {details}" if details else ""))
