"""Errors that cross the channel: by their stable reason and their message."""

from __future__ import annotations

from twinstage.errors import (
    Cancelled,
    ChecksumMismatch,
    DeadlineExceeded,
    Draining,
    HandshakeRefused,
    InternalError,
    KvExhausted,
    Overloaded,
    StaleHandle,
    TransferError,
    TwinstageError,
    Unavailable,
)

_BY_REASON: dict[str, type[TwinstageError]] = {
    kind.reason: kind
    for kind in (
        TransferError,
        HandshakeRefused,
        StaleHandle,
        ChecksumMismatch,
        Overloaded,
        KvExhausted,
        Unavailable,
        Draining,
        DeadlineExceeded,
        Cancelled,
        InternalError,
    )
}


def error_from_reason(reason: str, message: str) -> TwinstageError:
    """The error that the peer named; a reason that does not belong on this channel becomes a TransferError."""
    kind = _BY_REASON.get(reason)
    return TransferError(f"{reason}: {message}") if kind is None else kind(message)
