"""Every error has a code, travels in small details, and comes back as what it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest
import structlog
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rpc_service import failing_with, serving
from twinstage import errors
from twinstage.errors import FieldViolation, InvalidRequest, TwinstageError
from twinstage.rpc.status import (
    CODES,
    DETAILS_LIMIT_BYTES,
    MESSAGE_LIMIT_BYTES,
    RpcStatus,
    all_error_classes,
    code_of,
    error_from_reason,
    error_from_rpc,
    error_to_status,
)

UNQUOTED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # what grpc-message carries as it is
CLASSES = sorted(
    (item for item in all_error_classes() if item.__module__ == errors.__name__), key=lambda item: item.__name__
)


def make_error(error_class: type[TwinstageError], message: str = "this went wrong; do that") -> TwinstageError:
    """An error of the class with telling values in all of its parts."""
    if issubclass(error_class, InvalidRequest):
        return error_class([FieldViolation("sampling.top_p", "must be above 0"), FieldViolation("prompt", "is empty")])
    if issubclass(error_class, errors.NotFound | errors.AlreadyExists):
        return error_class(message, resource_type="model", resource_name="smollm2")
    if issubclass(error_class, errors.Overloaded | errors.Unavailable):
        return error_class(message, retry_after_s=2.25)
    if issubclass(error_class, errors.StreamBroken):
        return error_class(message, tokens_sent=17)
    return error_class(message)


def details_of(status: RpcStatus | status_pb2.Status) -> dict[str, Message]:
    """The details by the name of their type."""
    packed = status.details.details if isinstance(status, RpcStatus) else status.details
    found: dict[str, Message] = {}
    for item in packed:
        detail = getattr(error_details_pb2, item.TypeName().rpartition(".")[2])()
        assert item.Unpack(detail)
        found[item.TypeName().rpartition(".")[2]] = detail
    return found


def assert_small(status: RpcStatus) -> None:
    assert len(quote(status.message, safe=UNQUOTED)) <= MESSAGE_LIMIT_BYTES
    assert status.details.ByteSize() <= DETAILS_LIMIT_BYTES


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda item: item.__name__)
def test_every_error_class_is_in_the_table(error_class: type[TwinstageError]) -> None:
    assert any(ancestor in CODES for ancestor in error_class.__mro__), f"{error_class.__name__} has no code"


def test_codes_are_those_of_the_public_api() -> None:
    expected = {
        errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
        errors.NotFound: grpc.StatusCode.NOT_FOUND,
        errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
        errors.TaskNotSupported: grpc.StatusCode.FAILED_PRECONDITION,
        errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.KvExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.NoWorker: grpc.StatusCode.UNAVAILABLE,
        errors.Draining: grpc.StatusCode.UNAVAILABLE,
        errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
        errors.StreamBroken: grpc.StatusCode.ABORTED,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert {error_class: code_of(error_class) for error_class in expected} == expected


def test_reasons_are_unique_and_lead_back_to_their_class() -> None:
    assert len({error_class.reason for error_class in CLASSES}) == len(CLASSES)
    for error_class in CLASSES:
        assert type(error_from_reason(error_class.reason, "text")) is error_class
    assert type(error_from_reason("FROM_THE_FUTURE", "text")) is errors.InternalError


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda item: item.__name__)
async def test_every_error_survives_a_real_call(error_class: type[TwinstageError]) -> None:
    sent = make_error(error_class)
    async with serving(**failing_with(sent)) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.call("unary_unary")
    received = error_from_rpc(caught.value)
    assert type(received) is error_class
    assert str(received) == str(sent)
    assert vars(received) == vars(sent)
    assert caught.value.code() is code_of(error_class)


def test_details_of_a_bad_request() -> None:
    status = error_to_status(make_error(InvalidRequest), "request-1")
    details = details_of(status)
    assert set(details) == {"ErrorInfo", "RequestInfo", "BadRequest"}
    assert details["ErrorInfo"] == error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="twinstage")
    assert details["RequestInfo"].request_id == "request-1"
    violations = [(item.field, item.description) for item in details["BadRequest"].field_violations]
    assert violations == [("sampling.top_p", "must be above 0"), ("prompt", "is empty")]


def test_details_of_a_missing_resource() -> None:
    details = details_of(error_to_status(make_error(errors.NotFound)))
    assert (details["ResourceInfo"].resource_type, details["ResourceInfo"].resource_name) == ("model", "smollm2")


def test_details_of_a_broken_stream_say_how_much_was_sent() -> None:
    details = details_of(error_to_status(make_error(errors.StreamBroken)))
    assert dict(details["ErrorInfo"].metadata) == {"tokens_sent": "17"}


@pytest.mark.parametrize("error_class", [item for item in CLASSES if item.retryable], ids=lambda item: item.__name__)
def test_retryable_errors_say_when_to_come_back(error_class: type[TwinstageError]) -> None:
    error = make_error(error_class)
    status = error_to_status(error)
    expected_s = getattr(error, "retry_after_s", 1.0)
    assert details_of(status)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == expected_s
    assert dict(status.trailing_metadata)["grpc-retry-pushback-ms"] == str(int(expected_s * 1000))


@pytest.mark.parametrize(
    "error_class", [item for item in CLASSES if not item.retryable], ids=lambda item: item.__name__
)
def test_other_errors_do_not(error_class: type[TwinstageError]) -> None:
    status = error_to_status(make_error(error_class))
    assert "RetryInfo" not in details_of(status)
    assert set(dict(status.trailing_metadata)) == {"grpc-status-details-bin"}


@pytest.mark.parametrize(
    ("given_s", "sent_ms"), [(-1.0, "0"), (0.0001, "1"), (math.inf, "3600000"), (math.nan, "3600000")]
)
def test_odd_retry_times_are_bounded(given_s: float, sent_ms: str) -> None:
    status = error_to_status(errors.Overloaded("full", retry_after_s=given_s))
    assert dict(status.trailing_metadata)["grpc-retry-pushback-ms"] == sent_ms


def test_a_foreign_exception_keeps_its_text_to_itself() -> None:
    status = error_to_status(ValueError("password=hunter2"), "request-1")
    assert status.code is grpc.StatusCode.INTERNAL
    assert status.message == "internal error in request request-1; see the server's log"
    assert b"hunter2" not in status.details.SerializeToString()


def _huge_errors() -> Iterator[TwinstageError]:
    for text in ("x" * 100_000, "é" * 100_000, "\U0001f600" * 100_000, "%\n" * 50_000, "\ud800" * 5_000):
        yield errors.InternalError(text)
        yield errors.NotFound(text, resource_type=text, resource_name=text)
        yield InvalidRequest([FieldViolation(text, text)])
        yield InvalidRequest([FieldViolation(f"prompts[{number}]", text[:200]) for number in range(5_000)])
        yield InvalidRequest([FieldViolation("f", "d") for _ in range(5_000)])


@pytest.mark.parametrize("error", list(_huge_errors()), ids=lambda error: f"{type(error).__name__}-{len(str(error))}")
async def test_huge_errors_are_cut_and_still_arrive(error: TwinstageError) -> None:
    assert_small(error_to_status(error, "r" * 128))
    async with serving(**failing_with(error)) as service:
        # Logs are captured, because rendering such a traceback for a console takes longer than the test.
        with structlog.testing.capture_logs(), pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.call("unary_unary")
    assert type(error_from_rpc(caught.value)) is type(error)
    assert rpc_status.from_call(caught.value) is not None


def test_violations_that_do_not_fit_are_counted() -> None:
    status = error_to_status(InvalidRequest([FieldViolation(f"prompts[{i}]", "is too long " * 9) for i in range(100)]))
    *kept, note = details_of(status)["BadRequest"].field_violations
    assert [item.field for item in kept] == [f"prompts[{i}]" for i in range(len(kept))]
    assert len(kept) > 5
    assert (note.field, note.description) == ("", f"{100 - len(kept)} more violations were left out")


def _foreign(code: grpc.StatusCode, *metadata: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), "transport text", None)


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerLost),
        (grpc.StatusCode.UNKNOWN, errors.WorkerLost),
        (grpc.StatusCode.INTERNAL, errors.WorkerLost),
        (grpc.StatusCode.CANCELLED, errors.WorkerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unimplemented),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.PERMISSION_DENIED, errors.InternalError),
    ],
    ids=str,
)
def test_statuses_of_the_transport(code: grpc.StatusCode, error_class: type[TwinstageError]) -> None:
    error = error_from_rpc(_foreign(code))
    assert type(error) is error_class
    assert str(error) == f"the call failed with {code.name}: transport text"


def test_unreadable_details_and_those_of_others_are_ignored() -> None:
    garbage = _foreign(grpc.StatusCode.UNAVAILABLE, ("grpc-status-details-bin", b"\xff\xff\xff"))
    assert type(error_from_rpc(garbage)) is errors.WorkerLost
    other = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0])
    other.details.add().Pack(error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="example.com"))
    error = _foreign(grpc.StatusCode.UNAVAILABLE, ("grpc-status-details-bin", other.SerializeToString()))
    assert type(error_from_rpc(error)) is errors.WorkerLost


def test_a_reason_of_a_newer_peer_means_what_its_code_means() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUOTA", domain="twinstage"))
    error = _foreign(grpc.StatusCode.RESOURCE_EXHAUSTED, ("grpc-status-details-bin", status.SerializeToString()))
    assert type(error_from_rpc(error)) is errors.Overloaded


async def test_a_refused_connection_is_a_lost_worker(unused_tcp_port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/twinstage.test.Echo/unary_unary")(b"", timeout=10)
    assert type(error_from_rpc(caught.value)) is errors.WorkerLost
