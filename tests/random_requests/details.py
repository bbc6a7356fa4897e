"""What every failure must carry for its client, beside a code: the details that the API promises, within its limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

MAX_MESSAGE_BYTES = 1024
MAX_DETAILS_BYTES = 4096
_REQUIRED: dict[grpc.StatusCode, tuple[type[Message], ...]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest),
    grpc.StatusCode.NOT_FOUND: (error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo),
    grpc.StatusCode.ALREADY_EXISTS: (error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo),
    grpc.StatusCode.FAILED_PRECONDITION: (error_details_pb2.ErrorInfo,),
    grpc.StatusCode.UNIMPLEMENTED: (error_details_pb2.ErrorInfo,),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo),
}
_SUBSCRIPT = re.compile(r"\[[^\]]*\]")


def missing_details(
    code: grpc.StatusCode, words: str, trailing: Sequence[tuple[str, Any]], request: Descriptor
) -> Iterator[str]:
    """What is wrong with the details of a failure; `request` is the kind of message that was sent."""
    if code not in _REQUIRED:
        return
    metadata: Mapping[str, Any] = dict(trailing)
    serialized = metadata.get("grpc-status-details-bin", b"")
    if not words or len(words.encode()) > MAX_MESSAGE_BYTES or len(serialized) > MAX_DETAILS_BYTES:
        yield f"a message of {len(words.encode())} bytes and details of {len(serialized)}"
    status = status_pb2.Status.FromString(serialized)
    for kind in _REQUIRED[code]:
        if not any(packed.Is(kind.DESCRIPTOR) for packed in status.details):
            yield f"no {kind.DESCRIPTOR.name} in the details"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "grpc-retry-pushback-ms" not in metadata:
        yield "no grpc-retry-pushback-ms"
    bad_request = error_details_pb2.BadRequest()
    for packed in status.details:
        packed.Unpack(bad_request)
    for violation in bad_request.field_violations:
        if not violation.description or not _is_path(violation.field, request):
            yield f"a violation of {violation.field!r}: {violation.description!r}"


def _is_path(path: str, kind: Descriptor | None) -> bool:
    """Whether a path leads to a field; an empty one stands for the whole message."""
    for name in filter(None, _SUBSCRIPT.sub("", path).split(".")):
        if kind is None or kind.full_name == "google.protobuf.Struct":  # any key, of which nobody knows
            return kind is not None
        if name not in kind.fields_by_name:
            return False
        kind = kind.fields_by_name[name].message_type
    return True
