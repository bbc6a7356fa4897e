"""A gRPC service of four methods, one of each kind, whose behaviours each test writes itself.

    async with serving(unary_unary=behaviour) as service:
        reply = await service.unary_unary(GenerateRequest(prompt="Hello"))

Requests are GenerateRequest, because it carries a request id; responses are StringValue.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from twinstage.rpc.server import bind, create_server
from twinstage.v1.generation_pb2 import GenerateRequest

SERVICE = "twinstage.test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass(frozen=True, slots=True)
class Service:
    """The service as a client sees it."""

    port: int
    channel: grpc.aio.Channel

    def __getattr__(self, kind: str) -> Any:
        if kind not in KINDS:
            raise AttributeError(kind)
        return getattr(self.channel, kind)(
            f"/{SERVICE}/{kind}",
            request_serializer=GenerateRequest.SerializeToString,
            response_deserializer=StringValue.FromString,
        )

    async def call(self, kind: str, request: GenerateRequest | None = None, **options: Any) -> list[str]:
        """Send one request to a method of any kind and return all replies."""
        request = request or GenerateRequest(prompt="Hello")
        method = getattr(self, kind)
        call = method(iter([request]) if kind.startswith("stream") else request, **options)
        try:
            if kind.endswith("unary"):
                return [(await call).value]
            return [reply.value async for reply in call]
        finally:
            # grpc.aio misses a cancellation of the reading task that falls between the sending and the reading.
            call.cancel()


@contextlib.asynccontextmanager
async def serving(
    *, interceptors: Sequence[Any] = (), max_bytes: int = 1024 * 1024, **behaviours: Callable[..., Any]
) -> AsyncIterator[Service]:
    """Serve the given behaviours on a free port of the loopback interface until the scope ends."""
    server = create_server(interceptors, max_receive_bytes=max_bytes, max_send_bytes=max_bytes)
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(
            behaviour,
            request_deserializer=GenerateRequest.FromString,
            response_serializer=StringValue.SerializeToString,
        )
        for kind, behaviour in behaviours.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Service(port, channel)
    finally:
        await server.stop(0)


def failing_with(error: BaseException, *, after: int = 0) -> dict[str, Callable[..., Any]]:
    """Behaviours of all kinds that raise `error`; the streaming ones after `after` replies."""

    async def once(request: Any, context: Any) -> StringValue:
        raise error

    async def stream(request: Any, context: Any) -> AsyncIterator[StringValue]:
        for number in range(after):
            yield StringValue(value=str(number))
        raise error

    return {"unary_unary": once, "unary_stream": stream, "stream_unary": once, "stream_stream": stream}
