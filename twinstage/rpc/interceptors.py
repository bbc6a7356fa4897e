"""The outermost handler of every call: whatever a service raises becomes a status, and nothing else gets out.

    TwinstageError                      the status of rpc/status.py
    any other exception                 INTERNAL with the request's id; the traceback goes to the log
    CancelledError, client gone         a cancellation; there is nobody to tell
    CancelledError, client waiting      UNAVAILABLE (grpc.aio would leave the client waiting for its deadline)
    a request that cannot be decoded    INVALID_ARGUMENT (grpc.aio would answer UNKNOWN with the exception's text)

It also gives each call a request id and a trace (`call_context`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc

from twinstage.errors import (
    FieldViolation,
    InternalError,
    InvalidRequest,
    Overloaded,
    TwinstageError,
    Unavailable,
    Unimplemented,
)
from twinstage.rpc.call_context import current_request_id, enter_call
from twinstage.rpc.observer import CallObserver
from twinstage.rpc.status import code_of, error_to_status
from twinstage.telemetry.log import get_logger

WRITE_TIMEOUT_S = 60.0  # in which a client has to take a message of a stream, or some of what is before it
_STOPPED = "the server stopped working on the request; try again"
LAST_WORD_S = 2.0  # for the status of a call whose client takes nothing; then the call is dropped

logger = get_logger(__name__)

if TYPE_CHECKING:  # generic for the type checker only
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    ServerInterceptor = grpc.aio.ServerInterceptor


class ErrorInterceptor(ServerInterceptor):
    """The outermost interceptor of every server; `create_server` puts it there.

    Handlers are coroutine functions or async generator functions. An async generator is closed before the status is
    sent, on every path, so what it holds is freed when the client learns the outcome.
    """

    def __init__(self, observer: CallObserver | None = None) -> None:
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        try:
            handler = await continuation(handler_call_details)
        except Exception as error:  # an inner interceptor refused the call, or failed: an outermost boundary
            return _refusing(error, handler_call_details.method, self._observer)
        # grpc.aio answers UNIMPLEMENTED by itself when nothing serves the method.
        return handler if handler is None else _guarded(handler, handler_call_details.method, self._observer)


# --- wrapping -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request message whose bytes are not one."""

    description: str


def _guarded(handler: Handler, method: str, observer: CallObserver | None) -> Handler:
    """A handler of the same kind around `handler`."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert behaviour is not None, f"{method} has no behaviour"
    call = _Call(
        method=method,
        behaviour=behaviour,
        request_streaming=handler.request_streaming,
        serialize=handler.response_serializer or bytes,
        observer=observer,
    )
    return _make_handler(
        call.answer_stream if handler.response_streaming else call.answer_once,
        request_streaming=handler.request_streaming,
        response_streaming=handler.response_streaming,
        request_deserializer=_tolerant(handler.request_deserializer),
        response_serializer=_once(handler.response_serializer),
    )


def _refusing(error: Exception, method: str, observer: CallObserver | None) -> Handler:
    """A handler that fails with `error`; on the wire it fits every kind of method."""

    async def refuse(requests: object, context: Context) -> None:
        raise error

    call = _Call(method=method, behaviour=refuse, request_streaming=True, serialize=bytes, observer=observer)
    return _make_handler(
        call.answer_stream,
        request_streaming=True,
        response_streaming=True,
        request_deserializer=None,
        response_serializer=None,
    )


def _make_handler(
    behaviour: Callable[[Any, Any], Awaitable[Any]],
    *,
    request_streaming: bool,
    response_streaming: bool,
    request_deserializer: Callable[[bytes], Any] | None,
    response_serializer: Callable[[Any], bytes] | None,
) -> Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[request_streaming, response_streaming]
    return make(behaviour, request_deserializer, response_serializer)


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns `_Undecodable` where the other one raises: it runs outside of the handler."""
    if deserialize is None:
        return None

    def try_to_deserialize(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:  # the protobuf runtime's own; a boundary to foreign bytes
            logger.info("undecodable request", error=str(error))
            return _Undecodable("the request is not a valid message of the method's request type")

    return try_to_deserialize


def _once(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """A serializer that passes on what `_Call` has serialized, so that a wrong answer fails inside of it."""
    if serialize is None:
        return None
    return lambda message: message if isinstance(message, bytes) else serialize(message)


# --- one call -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Runs one method's behaviour and turns its failures into statuses."""

    method: str
    behaviour: Callable[[Any, Any], Any]
    request_streaming: bool
    serialize: Callable[[Any], bytes]
    observer: CallObserver | None

    async def answer_once(self, request: Any, context: Context) -> bytes:
        """Behaviour of a method with one response."""

        async def answer() -> bytes:
            return self.serialize(await self.behaviour(self._checked(request), context))

        return cast(bytes, await self._run(answer, request, context))

    async def answer_stream(self, request: Any, context: Context) -> None:
        """Behaviour of a method with a stream of responses.

        The responses are written here and not by grpc.aio, which does not close the generator of a call that ended.
        """

        async def answer() -> None:
            responses = self.behaviour(self._checked(request), context)
            if inspect.isawaitable(responses):
                await responses
                return
            async with contextlib.AsyncExitStack() as stack:
                if inspect.isasyncgen(responses):
                    await stack.enter_async_context(contextlib.aclosing(responses))
                async for response in responses:
                    await _write(context, self.serialize(response))

        await self._run(answer, request, context)

    def _checked(self, request: Any) -> Any:
        """The request or the stream of requests; raises InvalidRequest for what could not be decoded."""
        return _checked_stream(request) if self.request_streaming else _checked_message(request)

    async def _run(self, answer: Callable[[], Awaitable[Any]], request: Any, context: Context) -> Any:
        enter_call(request, context)
        if self.observer is None:
            return await self._guard(answer, context)
        started_s, code = time.monotonic(), grpc.StatusCode.CANCELLED
        try:
            answered = await self._guard(answer, context)
            code = grpc.StatusCode.OK
            return answered
        except grpc.aio.AbortError:
            code = status_code(context.code())
            raise
        finally:
            self.observer.handled(self.method, code.name, time.monotonic() - started_s)

    async def _guard(self, answer: Callable[[], Awaitable[Any]], context: Context) -> Any:
        """What `answer` returns. Raises AbortError when the client was told of a failure, or CancelledError."""
        try:
            return await answer()
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            # Nobody here can tell whether the client has gone or something of ours was cancelled; the core can.
            await self._abort(context, Unavailable(_STOPPED), event="call cancelled", level=logging.WARNING)
        except grpc.aio.InternalError:
            # The core could not send: nearly always, because the client has gone.
            await self._abort(context, InternalError("the answer could not be sent"), event="answer not sent")
        except grpc.aio.UsageError as error:
            await self._fail(context, error)
        except grpc.aio.BaseError:
            # The core's private error for who reads a request while the server stops.
            await self._abort(context, Unavailable(_STOPPED), event="call ended with the server")
        except TwinstageError as error:
            if code_of(error) is grpc.StatusCode.INTERNAL:
                logger.error("call failed", method=self.method, exc_info=error)
            await self._abort(context, error, event="call refused")
        except NotImplementedError as error:
            if context.code() is not grpc.StatusCode.UNIMPLEMENTED:
                await self._fail(context, error)
            # The generated base class of a service raises it for methods that the service does not have.
            await self._abort(context, Unimplemented(f"{self.method} is not implemented"), event="call refused")
        except Exception as error:  # the outermost boundary: nothing that a handler raises may reach a client
            await self._fail(context, error)

    async def _fail(self, context: Context, error: Exception) -> NoReturn:
        logger.error("call failed unexpectedly", method=self.method, exc_info=error)
        await self._abort(context, error, event="call failed")

    async def _abort(self, context: Context, error: Exception, *, event: str, level: int = logging.DEBUG) -> NoReturn:
        """Send the status and raise grpc.aio.AbortError, or CancelledError when the client has gone meanwhile."""
        if self.observer is not None:
            self.observer.failing(self.method, error)
        status = error_to_status(error, current_request_id())
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await context.abort(status.code, status.message, status.trailing_metadata)
        except TimeoutError:
            logger.debug(event, method=self.method, client="takes nothing")
            raise asyncio.CancelledError from None
        except grpc.aio.AbortError:
            logger.log(level, event, method=self.method, code=status.code.name, message=status.message)
            raise
        except grpc.aio.BaseError:
            logger.debug(event, method=self.method, client="gone")
            raise asyncio.CancelledError from None


def status_code(code: Any) -> grpc.StatusCode:
    """The code that a call was ended with, which the core keeps as a number."""
    return next((known for known in grpc.StatusCode if code in (known, known.value[0])), grpc.StatusCode.UNKNOWN)


async def _write(context: Context, message: bytes) -> None:
    """Send a message of a stream. Raises Overloaded when the client takes nothing: what it is owed would pile up."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(message)
    except TimeoutError:
        raise Overloaded(f"the client took nothing of the answer for {WRITE_TIMEOUT_S:.0f} s") from None


def _checked_message(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequest([FieldViolation("", request.description)])
    return request


async def _checked_stream(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked_message(request)
