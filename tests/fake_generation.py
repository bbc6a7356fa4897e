"""A GenerationService without a model: enough to try clients against."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from twinstage.errors import FieldViolation, InvalidRequest, KvExhausted
from twinstage.rpc.health import SERVICE_NAME, HealthService
from twinstage.rpc.reflection import add_reflection
from twinstage.rpc.server import bind, create_server
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

GENERATION_SERVICE = "twinstage.v1.GenerationService"
ANSWER = ("Grüße", ", ", "world", " ✓")


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every prompt with `ANSWER`; serves at most `capacity` calls at a time, each for `seconds`."""

    def __init__(self, *, capacity: int = 1000, seconds: float = 0.0) -> None:
        self._capacity = capacity
        self._seconds = seconds
        self._running = 0

    @contextlib.asynccontextmanager
    async def _permit(self, request: generation_pb2.GenerateRequest) -> AsyncIterator[None]:
        if not request.prompt:
            raise InvalidRequest([FieldViolation("prompt", "is empty")])
        if self._running >= self._capacity:
            raise KvExhausted("full", retry_after_s=0.5)
        self._running += 1
        try:
            await asyncio.sleep(self._seconds)
            yield
        finally:
            self._running -= 1

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> generation_pb2.GenerateResponse:  # noqa: N802
        async with self._permit(request):
            result = generation_pb2.GenerationResult(text="".join(ANSWER), finish_reason=common_pb2.FINISH_REASON_STOP)
            return generation_pb2.GenerateResponse(request_id=request.request_id, results=[result])

    async def GenerateStream(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        response = generation_pb2.GenerateStreamResponse
        async with self._permit(request):
            yield response(prompt_info=generation_pb2.PromptInfo(request_id=request.request_id, prompt_tokens=1))
            for text in ANSWER:
                yield response(delta=generation_pb2.Delta(text=text))
            yield response(finished=generation_pb2.Finished(finish_reason=common_pb2.FINISH_REASON_STOP))
            usage = common_pb2.Usage(prompt_tokens=1, completion_tokens=len(ANSWER))
            yield response(summary=generation_pb2.Summary(usage=usage))

    async def Chat(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ChatStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@contextlib.asynccontextmanager
async def fake_server(servicer: FakeGeneration, *, reflection: bool = True) -> AsyncIterator[str]:
    """Serve on a free port of the loopback interface until the scope ends; yields the address."""
    server, health = create_server(), HealthService([GENERATION_SERVICE])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health.attach(server)
    if reflection:
        add_reflection(server, [GENERATION_SERVICE, SERVICE_NAME])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    health.set("", serving=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        health.end_watches()
        await server.stop(0)
