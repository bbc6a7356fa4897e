"""Whatever a handler does, its client gets a status at once, and learns nothing that it should not."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc._cython import cygrpc
from structlog.testing import capture_logs

from rpc_service import KINDS, SERVICE, Service, failing_with, serving
from twinstage.errors import IntegrityError, InvalidRequest, KvExhausted, StreamBroken, Unavailable
from twinstage.rpc.call_context import current_request_id
from twinstage.rpc.interceptors import ErrorInterceptor
from twinstage.rpc.status import error_from_rpc
from twinstage.v1.generation_pb2 import GenerateRequest

STREAMS = [kind for kind in KINDS if kind.endswith("stream")]


async def _failure(service: Service, kind: str, *arguments: Any, **options: Any) -> grpc.aio.AioRpcError:
    """How the call failed; it has five seconds, which no test here needs."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(service.call(kind, *arguments, **options), 5)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_our_errors_become_their_status(kind: str) -> None:
    async with serving(**failing_with(KvExhausted("no blocks", retry_after_s=3.0))) as service:
        error = await _failure(service, kind)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "no blocks"
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "3000"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_the_server_is_no_bug_of_the_handler(kind: str) -> None:
    """Who reads a request while the server stops gets an error of the core's that is not public."""
    with capture_logs() as logs:
        async with serving(**failing_with(cygrpc._ServerStoppedError("Server already stopped."))) as service:
            error = await _failure(service, kind)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert not [entry for entry in logs if entry["log_level"] == "error"]


@pytest.mark.parametrize("kind", STREAMS)
async def test_errors_after_replies_become_their_status(kind: str) -> None:
    received = []
    async with serving(**failing_with(StreamBroken("lost", tokens_sent=2), after=2)) as service:
        request = GenerateRequest(prompt="Hello")
        call = getattr(service, kind)(iter([request]) if kind == "stream_stream" else request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            received.extend([reply.value async for reply in call])
    error = error_from_rpc(caught.value)
    assert isinstance(error, StreamBroken)
    assert error.tokens_sent == 2


async def _drain(replies: AsyncIterator[StringValue]) -> None:
    async for _ in replies:
        pass


async def test_a_client_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core takes some megabytes for it; then the call ends, its generator is closed, and nothing more is made."""
    monkeypatch.setattr("twinstage.rpc.interceptors.WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("twinstage.rpc.interceptors.LAST_WORD_S", 0.1)
    closed = asyncio.Event()

    async def endless(request: object, context: object) -> AsyncIterator[StringValue]:
        try:
            while True:
                yield StringValue(value="x" * 65536)
        finally:
            closed.set()

    async with serving(unary_stream=endless) as service:
        call = service.unary_stream(GenerateRequest(prompt="Hello"))
        async with asyncio.timeout(10):
            await closed.wait()
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(_drain(call), 10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", KINDS)
async def test_other_exceptions_are_logged_and_not_told(kind: str) -> None:
    with capture_logs() as logs:
        async with serving(**failing_with(ValueError("password=hunter2"))) as service:
            error = await _failure(service, kind, metadata=[("x-request-id", "request-7")])
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "see the server's log" in (error.details() or "")
    assert "hunter2" not in repr(error)
    (record,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert isinstance(record["exc_info"], ValueError)
    assert record["method"] == f"/{SERVICE}/{kind}"


async def test_our_own_bugs_are_logged_with_their_traceback() -> None:
    with capture_logs() as logs:
        async with serving(**failing_with(IntegrityError("the books do not balance"))) as service:
            error = await _failure(service, "unary_unary")
    assert error.code() is grpc.StatusCode.INTERNAL
    assert [entry["exc_info"] for entry in logs if "exc_info" in entry]


@pytest.mark.parametrize("kind", KINDS)
async def test_our_own_cancellation_does_not_leave_the_client_waiting(kind: str) -> None:
    with capture_logs() as logs:
        async with serving(**failing_with(asyncio.CancelledError())) as service:
            error = await _failure(service, kind)
    assert isinstance(error_from_rpc(error), Unavailable)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["call cancelled"]


async def test_refusals_are_logged_quietly() -> None:
    with capture_logs() as logs:
        async with serving(**failing_with(KvExhausted("full"))) as service:
            await _failure(service, "unary_unary")
    refusals = [(entry["event"], entry["code"], entry["log_level"]) for entry in logs]
    assert refusals == [("call refused", "RESOURCE_EXHAUSTED", "debug")]


async def test_a_cancelled_handler_task_does_not_leave_the_client_waiting() -> None:
    async def behaviour(request: Any, context: Any) -> StringValue:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    async with serving(unary_unary=behaviour) as service:
        error = await _failure(service, "unary_unary")
    assert isinstance(error_from_rpc(error), Unavailable)


class Waiting:
    """A handler that waits until it is cancelled or closed, and says when it started and ended."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.seen: BaseException | None = None

    async def once(self, request: Any, context: Any) -> StringValue:
        async for _ in self.stream(request, context):
            pass
        raise AssertionError("the stream ended")

    async def stream(self, request: Any, context: Any) -> AsyncIterator[StringValue]:
        try:
            yield StringValue(value="first")
            self.started.set()
            await asyncio.sleep(60)
        except BaseException as error:
            self.seen = error
            raise
        finally:
            self.ended.set()

    async def flood(self, request: Any, context: Any) -> AsyncIterator[StringValue]:
        """More than the client's window holds, so that the wait is in the writing."""
        try:
            for _ in range(10_000):
                self.started.set()
                yield StringValue(value="x" * 500_000)
        except BaseException as error:
            self.seen = error
            raise
        finally:
            self.ended.set()

    def behaviours(self) -> dict[str, Callable[..., Any]]:
        return {
            "unary_unary": self.once,
            "unary_stream": self.stream,
            "stream_unary": self.once,
            "stream_stream": self.stream,
        }


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_cancels_ends_the_handler(kind: str) -> None:
    waiting = Waiting()
    with capture_logs() as logs:
        async with serving(**waiting.behaviours()) as service:
            call = asyncio.create_task(service.call(kind))
            await asyncio.wait_for(waiting.started.wait(), 5)
            call.cancel()
            await asyncio.wait_for(waiting.ended.wait(), 5)
    assert isinstance(waiting.seen, asyncio.CancelledError)
    assert not [entry for entry in logs if entry["log_level"] in {"warning", "error"}]


async def test_a_client_that_cancels_while_we_write_ends_the_handler() -> None:
    waiting = Waiting()
    with capture_logs() as logs:
        async with serving(unary_stream=waiting.flood) as service:
            call = service.unary_stream(GenerateRequest(prompt="Hello"))
            await asyncio.wait_for(waiting.started.wait(), 5)
            call.cancel()
            await asyncio.wait_for(waiting.ended.wait(), 5)
    assert isinstance(waiting.seen, GeneratorExit)
    assert not [entry for entry in logs if entry["log_level"] in {"warning", "error"}]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_ends_the_handler(kind: str) -> None:
    waiting = Waiting()
    async with serving(**waiting.behaviours()) as service:
        error = await _failure(service, kind, timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(waiting.ended.wait(), 5)


async def test_the_handler_has_let_go_before_the_client_hears_of_the_failure() -> None:
    released = False

    async def behaviour(request: Any, context: Any) -> AsyncIterator[StringValue]:
        nonlocal released
        try:
            yield StringValue(value="first")
            raise Unavailable("lost")
        finally:
            await asyncio.sleep(0.05)
            released = True

    async with serving(unary_stream=behaviour) as service:
        await _failure(service, "unary_stream")
    assert released


async def test_an_answer_of_the_wrong_type_is_internal() -> None:
    async def once(request: Any, context: Any) -> Any:
        return {"password": "hunter2"}

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        yield "hunter2"

    async with serving(unary_unary=once, unary_stream=stream) as service:
        for kind in ("unary_unary", "unary_stream"):
            error = await _failure(service, kind)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "hunter2" not in repr(error)


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_are_no_request_are_the_clients_fault(kind: str) -> None:
    async def once(request: Any, context: Any) -> StringValue:
        if kind.startswith("stream"):
            return StringValue(value=str(len([item async for item in request])))
        return StringValue(value=request.prompt)

    async def stream(request: Any, context: Any) -> AsyncIterator[StringValue]:
        yield await once(request, context)

    behaviours = dict(zip(KINDS, (once, stream, once, stream), strict=True))
    async with serving(**behaviours) as service:
        call = getattr(service.channel, kind)(f"/{SERVICE}/{kind}")
        sent = iter([b"\xff\xff"]) if kind.startswith("stream") else b"\xff\xff"
        response = call(sent, timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (response if kind.endswith("unary") else response.read())
    assert isinstance(error_from_rpc(caught.value), InvalidRequest)


async def test_a_handlers_own_abort_stays_as_it_is() -> None:
    async def behaviour(request: Any, context: Any) -> StringValue:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "as I said")
        raise AssertionError("abort returned")

    async with serving(unary_unary=behaviour) as service:
        error = await _failure(service, "unary_unary")
    assert (error.code(), error.details()) == (grpc.StatusCode.OUT_OF_RANGE, "as I said")


async def test_handlers_may_write_and_read_through_the_context() -> None:
    async def write(request: Any, context: Any) -> None:
        for word in request.prompt.split():
            await context.write(StringValue(value=word))

    async def echo(requests: Any, context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield StringValue(value=request.prompt.upper())

    async def total(requests: Any, context: Any) -> StringValue:
        return StringValue(value=" ".join([request.prompt async for request in requests]))

    async with serving(unary_stream=write, stream_stream=echo, stream_unary=total) as service:
        assert await service.call("unary_stream", GenerateRequest(prompt="a b c")) == ["a", "b", "c"]
        requests = [GenerateRequest(prompt=word) for word in "abc"]
        assert [reply.value async for reply in service.stream_stream(iter(requests))] == ["A", "B", "C"]
        assert (await service.stream_unary(iter(requests))).value == "a b c"


async def test_methods_that_a_service_does_not_have_are_unimplemented() -> None:
    def generated(request: Any, context: Any) -> Any:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        raise NotImplementedError("Method not implemented!")

    async def unfinished(request: Any, context: Any) -> Any:
        raise NotImplementedError("an operator of some library")

    async with serving(unary_unary=generated, unary_stream=generated, stream_unary=unfinished) as service:
        for kind in ("unary_unary", "unary_stream"):
            assert (await _failure(service, kind)).code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await _failure(service, "stream_unary")).code() is grpc.StatusCode.INTERNAL
        assert (await _failure(service, "stream_stream")).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_answer_that_is_too_large_to_send_fails_at_once() -> None:
    async def behaviour(request: Any, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value="x" * 100_000)
        await asyncio.sleep(60)

    async with serving(unary_stream=behaviour, max_bytes=50_000) as service:
        assert (await _failure(service, "unary_stream")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Refusing(grpc.aio.ServerInterceptor):
    """An inner interceptor that lets nothing through."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], details: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_of_inner_interceptors_become_statuses_too(kind: str) -> None:
    async def behaviour(request: Any, context: Any) -> StringValue:
        raise AssertionError("reached")

    async with serving(interceptors=[Refusing(KvExhausted("full"))], **{kind: behaviour}) as service:
        error = await _failure(service, kind)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "metadata", "expected"),
    [
        ("from-the-message", "from-the-metadata", "from-the-message"),
        ("", "from-the-metadata", "from-the-metadata"),
        ("line\nbreak", "from-the-metadata", "from-the-metadata"),
        ("x" * 129, "x" * 129, None),
        ("", "", None),
    ],
)
async def test_request_ids(kind: str, field: str, metadata: str, expected: str | None) -> None:
    async def once(request: Any, context: Any) -> StringValue:
        await asyncio.sleep(0)
        return StringValue(value=current_request_id())

    async def stream(request: Any, context: Any) -> AsyncIterator[StringValue]:
        yield await once(request, context)

    if kind.startswith("stream") and expected == "from-the-message":
        expected = "from-the-metadata"  # a stream's messages come after its handler has started
    behaviours = dict(zip(KINDS, (once, stream, once, stream), strict=True))
    async with serving(interceptors=[ErrorInterceptor()], **behaviours) as service:
        request = GenerateRequest(prompt="Hello", request_id=field)
        first, second = [(await service.call(kind, request, metadata=[("x-request-id", metadata)]))[0] for _ in "12"]
    if expected is None:
        assert first != second
        assert first not in {field, metadata}
        assert len(first) == len(second) == 32
    else:
        assert first == second == expected
    assert current_request_id() == ""


# --- trailers only --------------------------------------------------------------------------------


def _literal(name: str, value: str) -> bytes:
    """One header for HPACK, without index and Huffman code; both parts are shorter than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _frames_of_a_call(port: int, kind: str) -> list[str]:
    """Make one call with bare HTTP/2 and name the frames of its answer, e.g. ["HEADERS", "HEADERS+END"]."""
    data, headers, settings, end_stream, end_headers = 0, 1, 4, 1, 4
    fields = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/{kind}", ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    message = GenerateRequest(prompt="Hello").SerializeToString()
    block = b"".join(_literal(name, value) for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, connection.makefile("rb") as answer:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(settings, 0, 0))
        connection.sendall(_frame(headers, end_headers, 1, block))
        connection.sendall(_frame(data, end_stream, 1, struct.pack(">BI", 0, len(message)) + message))
        names: list[str] = []
        while not names or not names[-1].endswith("+END"):
            length, kind_, flags, stream = struct.unpack(">IBBI", b"\0" + answer.read(9))
            answer.read(length)
            if stream == 1 and kind_ in {data, headers}:
                names.append(("DATA", "HEADERS")[kind_] + ("+END" if flags & end_stream else ""))
    return names


async def test_a_failure_before_the_first_reply_sends_no_initial_metadata() -> None:
    async def fine(request: Any, context: Any) -> AsyncIterator[StringValue]:
        yield StringValue(value="first")

    for behaviours in (failing_with(KvExhausted("full")), failing_with(ValueError("bug"))):
        async with serving(**behaviours) as service:
            for kind in ("unary_unary", "unary_stream"):
                assert await asyncio.to_thread(_frames_of_a_call, service.port, kind) == ["HEADERS+END"]
    async with serving(unary_stream=fine) as service:  # so that this test can fail
        names = await asyncio.to_thread(_frames_of_a_call, service.port, "unary_stream")
        assert names == ["HEADERS", "DATA", "HEADERS+END"]
