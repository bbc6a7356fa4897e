"""The one table between our errors and gRPC statuses, in both directions.

    error_to_status   what a service answers when it failed
    error_from_rpc    what a caller of one of our services makes of the answer

A status carries google.rpc details: ErrorInfo always (domain "twinstage", the error's stable reason), RequestInfo when
the request's id is known, RetryInfo when another attempt may help, ResourceInfo for what is missing or taken, and
BadRequest for wrong fields. Everything is kept small, because a status travels in trailers, and gRPC peers drop
trailers above 8 to 16 KB together with the error in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from twinstage.errors import (
    AlreadyExists,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FieldViolation,
    IllegalTransition,
    IntegrityError,
    InternalError,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PoisonedRequest,
    StreamBroken,
    TaskNotSupported,
    TransferError,
    TwinstageError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WorkerLost,
)

ERROR_DOMAIN = "twinstage"
MESSAGE_LIMIT_BYTES = 1024  # on the wire, where gRPC percent-encodes all but printable ASCII
DETAILS_LIMIT_BYTES = 4096  # of the serialized google.rpc.Status, message included
DETAILS_METADATA_KEY = "grpc-status-details-bin"
PUSHBACK_METADATA_KEY = "grpc-retry-pushback-ms"
DEFAULT_RETRY_AFTER_S = 1.0

_MAX_RETRY_AFTER_S = 3600.0
_RESOURCE_LIMIT_BYTES = 256
_FIELD_LIMIT_BYTES = 256
_DESCRIPTION_LIMIT_BYTES = 512
_BAD_REQUEST_OVERHEAD_BYTES = 192  # its Any with the type's URL, and the note about violations that were left out
_VIOLATION_OVERHEAD_BYTES = 4  # tag and length of one violation
_TOKENS_SENT_KEY = "tokens_sent"

# A class that is not listed has the code of its nearest listed ancestor.
CODES: Mapping[type[TwinstageError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    TaskNotSupported: grpc.StatusCode.FAILED_PRECONDITION,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StreamBroken: grpc.StatusCode.ABORTED,
    PoisonedRequest: grpc.StatusCode.INTERNAL,  # no client repeats it by itself
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    TransferError: grpc.StatusCode.UNAVAILABLE,
    ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    IllegalTransition: grpc.StatusCode.INTERNAL,
    IntegrityError: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
}

# What a status means that carries no ErrorInfo of ours: the transport, or a peer of another version, made it.
_FOREIGN_STATUSES: Mapping[grpc.StatusCode, type[TwinstageError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.UNKNOWN: WorkerLost,
    grpc.StatusCode.INTERNAL: WorkerLost,
    grpc.StatusCode.CANCELLED: WorkerLost,
    grpc.StatusCode.ABORTED: WorkerLost,
    grpc.StatusCode.DATA_LOSS: WorkerLost,
}

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatus:
    """A gRPC status, ready for `context.abort(status.code, status.message, status.trailing_metadata)`."""

    code: grpc.StatusCode
    message: str
    details: status_pb2.Status
    retry_after_s: float | None = None

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The details for clients that know them, and the pushback for those that retry by themselves."""
        metadata: list[tuple[str, str | bytes]] = [(DETAILS_METADATA_KEY, self.details.SerializeToString())]
        if self.retry_after_s is not None:
            metadata.append((PUSHBACK_METADATA_KEY, str(math.ceil(self.retry_after_s * 1000))))
        return tuple(metadata)


def code_of(error: TwinstageError | type[TwinstageError]) -> grpc.StatusCode:
    """The gRPC code of an error or error class."""
    error_class = error if isinstance(error, type) else type(error)
    return next((CODES[ancestor] for ancestor in error_class.__mro__ if ancestor in CODES), grpc.StatusCode.INTERNAL)


def error_to_status(error: BaseException, request_id: str | None = None) -> RpcStatus:
    """The status that tells a client about `error`.

    Of an exception that is not ours the client learns the request's id only: its text may hold anything.
    """
    if not isinstance(error, TwinstageError):
        request = f" in request {request_id}" if request_id else ""
        error = InternalError(f"internal error{request}; see the server's log")
    code = code_of(error)
    message = _shorten(str(error) or error.reason, MESSAGE_LIMIT_BYTES)
    retry_after_s = _retry_after_s(error)
    details = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, request_id, retry_after_s=retry_after_s):
        details.details.add().Pack(detail)
    if isinstance(error, InvalidRequest):
        budget_bytes = DETAILS_LIMIT_BYTES - details.ByteSize() - _BAD_REQUEST_OVERHEAD_BYTES
        details.details.add().Pack(_bad_request(error.violations, budget_bytes))
    return RpcStatus(code=code, message=message, details=details, retry_after_s=retry_after_s)


def error_from_rpc(error: grpc.aio.AioRpcError) -> TwinstageError:
    """The error that a service of ours raised on the other side of a failed call, or what the failure means.

    A status without our ErrorInfo was made by the transport: the worker is lost, the deadline is over, or the two
    sides are of different versions.
    """
    code, message = error.code(), error.details() or ""
    status = _status_of(error)
    if status is not None:
        info = _detail(status, error_details_pb2.ErrorInfo)
        if info is not None and info.domain == ERROR_DOMAIN:
            return _rebuild(_class_of(info.reason, code), message=message, status=status)
    error_class = _FOREIGN_STATUSES.get(code, InternalError)
    return error_class(f"the call failed with {code.name}" + (f": {message}" if message else ""))


def error_from_reason(reason: str, message: str) -> TwinstageError:
    """The error that a peer named by its reason in a message of a stream; InternalError for an unknown reason."""
    return _rebuild(_classes_by_reason().get(reason, InternalError), message=message, status=status_pb2.Status())


# --- error to status ------------------------------------------------------------------------------


def _details(error: TwinstageError, request_id: str | None, *, retry_after_s: float | None) -> Iterator[Message]:
    """All details but BadRequest, each small and bounded."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if isinstance(error, StreamBroken):
        info.metadata[_TOKENS_SENT_KEY] = str(error.tokens_sent)
    yield info
    if request_id:
        yield error_details_pb2.RequestInfo(request_id=_shorten(request_id, _RESOURCE_LIMIT_BYTES))
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(retry_after_s * 1000))
        yield retry
    if isinstance(error, NotFound | AlreadyExists):
        yield error_details_pb2.ResourceInfo(
            resource_type=_shorten(error.resource_type, _RESOURCE_LIMIT_BYTES),
            resource_name=_shorten(error.resource_name, _RESOURCE_LIMIT_BYTES),
        )


def _bad_request(violations: Iterable[FieldViolation], budget_bytes: int) -> error_details_pb2.BadRequest:
    """As many violations as fit into the budget, and a note about how many did not."""
    bad_request, left_out = error_details_pb2.BadRequest(), 0
    for violation in violations:
        proto = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(violation.field, _FIELD_LIMIT_BYTES),
            description=_shorten(violation.description, _DESCRIPTION_LIMIT_BYTES),
        )
        size_bytes = proto.ByteSize() + _VIOLATION_OVERHEAD_BYTES
        if left_out or size_bytes > budget_bytes:
            left_out += 1
            continue
        budget_bytes -= size_bytes
        bad_request.field_violations.append(proto)
    if left_out:
        bad_request.field_violations.add(description=f"{left_out} more violations were left out")
    return bad_request


def _retry_after_s(error: TwinstageError) -> float | None:
    """When the caller may come back, in [0, 3600] seconds; None when it need not."""
    if isinstance(error, Overloaded | Unavailable):
        retry_after_s = error.retry_after_s
        return min(max(retry_after_s, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(retry_after_s) else _MAX_RETRY_AFTER_S
    return DEFAULT_RETRY_AFTER_S if error.retryable else None


def _shorten(text: str, limit_bytes: int) -> str:
    """`text`, or as much of its start as stays within the limit on the wire, with "..." for the rest.

    Lone surrogates, which no message can carry, become question marks.
    """
    # One character takes one byte or more, so what follows is not worth a look.
    start = text[: limit_bytes + 1].encode("utf-8", "replace").decode("utf-8")
    if sum(map(_wire_bytes, start)) <= limit_bytes:
        return start
    used_bytes, length = len("..."), 0
    for character in start:
        used_bytes += _wire_bytes(character)
        if used_bytes > limit_bytes:
            break
        length += 1
    return start[:length] + "..."


def _wire_bytes(character: str) -> int:
    """Bytes of one character in a grpc-message header: UTF-8, percent-encoded unless printable ASCII."""
    if " " <= character <= "~" and character != "%":
        return 1
    return 3 * len(character.encode("utf-8"))


# --- status to error ------------------------------------------------------------------------------


def _rebuild(error_class: type[TwinstageError], *, message: str, status: status_pb2.Status) -> TwinstageError:
    """An instance of `error_class` with the parts that travelled in the details."""
    if issubclass(error_class, InvalidRequest):
        bad_request = _detail(status, error_details_pb2.BadRequest)
        violations = bad_request.field_violations if bad_request is not None else ()
        rebuilt = [FieldViolation(item.field, item.description) for item in violations]
        return error_class(rebuilt or [FieldViolation("", message)])
    if issubclass(error_class, NotFound | AlreadyExists):
        resource = _detail(status, error_details_pb2.ResourceInfo) or error_details_pb2.ResourceInfo()
        return error_class(message, resource_type=resource.resource_type, resource_name=resource.resource_name)
    if issubclass(error_class, Overloaded | Unavailable):
        retry = _detail(status, error_details_pb2.RetryInfo)
        retry_after_s = retry.retry_delay.ToMilliseconds() / 1000 if retry is not None else DEFAULT_RETRY_AFTER_S
        return error_class(message, retry_after_s=retry_after_s)
    if issubclass(error_class, StreamBroken):
        info = _detail(status, error_details_pb2.ErrorInfo)
        tokens_sent = info.metadata.get(_TOKENS_SENT_KEY, "") if info is not None else ""
        return error_class(message, tokens_sent=int(tokens_sent) if tokens_sent.isdecimal() else 0)
    return error_class(message)


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The details of a failed call; None when there are none, or they are not readable."""
    metadata = cast(Iterable[tuple[str, bytes]], error.trailing_metadata() or ())
    serialized = next((value for key, value in metadata if key == DETAILS_METADATA_KEY), None)
    if serialized is None:
        return None
    try:
        return status_pb2.Status.FromString(serialized)
    except DecodeError:
        return None


def _detail(status: status_pb2.Status, message_class: type[MessageT]) -> MessageT | None:
    """The first detail of a class; None when there is none, or it is not readable."""
    for packed in status.details:
        detail = message_class()
        if packed.Is(message_class.DESCRIPTOR):
            try:
                packed.Unpack(detail)
            except DecodeError:
                return None
            return detail
    return None


def _class_of(reason: str, code: grpc.StatusCode) -> type[TwinstageError]:
    """The class with this reason; a reason that only a newer peer knows falls back to what its code means."""
    by_code = next((error_class for error_class, listed in CODES.items() if listed is code), InternalError)
    return _classes_by_reason().get(reason, by_code)


def _classes_by_reason() -> dict[str, type[TwinstageError]]:
    return {error_class.reason: error_class for error_class in all_error_classes()}


def all_error_classes(base: type[TwinstageError] = TwinstageError) -> Iterator[type[TwinstageError]]:
    """Every class below `base` in the error tree, ancestors first."""
    for error_class in base.__subclasses__():
        yield error_class
        yield from all_error_classes(error_class)
