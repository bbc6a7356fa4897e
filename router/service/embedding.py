"""EmbeddingService: batches at once, or inputs as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from router.embedding import Embedding, EmbeddingResult
from router.embedding_stream import EmbeddingStream, StreamRequest, StreamResult
from router.encoder import Vector
from router.gate import Gate
from router.generation import Deadlines
from router.service.context import caller_of, seconds_left
from router.service.door import check_embed, check_encode, check_encode_stream
from twinstage.errors import TwinstageError
from twinstage.rpc.call_context import current_request_id
from twinstage.rpc.convert_public import (
    embed_request_from_proto,
    embedding_to_proto,
    encode_request_from_proto,
    encode_stream_request_from_proto,
    placement_to_proto,
    timing_to_proto,
    usage_to_proto,
)
from twinstage.rpc.endless import until_ending
from twinstage.rpc.status import error_to_status
from twinstage.types import EmbeddingFormat, RawEncodeRequest
from twinstage.v1 import embedding_pb2, embedding_pb2_grpc

PART_BYTES = 1024 * 1024  # of the vectors in one response of a stream
LARGE_ANSWER = 64  # vectors; turning more of them into messages would hold up the event loop


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Encode, Embed and EncodeStream."""

    def __init__(self, embedding: Embedding, *, gate: Gate, deadlines: Deadlines, draining: asyncio.Event) -> None:
        """At `draining`, streams are read no further: what was read is answered, and then they end."""
        self._embedding = embedding
        self._draining = draining
        self._gate = gate
        self._deadlines = deadlines

    async def Encode(  # noqa: N802 - the names of methods are the proto's
        self, request: embedding_pb2.EncodeRequest, context: Any
    ) -> embedding_pb2.EncodeResponse:
        check_encode(request)
        raw = encode_request_from_proto(request)
        result = await self._embed(raw, context)
        return embedding_pb2.EncodeResponse(
            request_id=result.request_id,
            model=result.model,
            embeddings=await _vectors_to_proto(result.vectors, raw.format),
            usage=usage_to_proto(result.usage),
            timing=timing_to_proto(result.timing),
            placement=placement_to_proto(result.placement),
        )

    async def Embed(  # noqa: N802
        self, request: embedding_pb2.EmbedRequest, context: Any
    ) -> embedding_pb2.EmbedResponse:
        check_embed(request)
        raw = embed_request_from_proto(request)
        result = await self._embed(raw, context)
        return embedding_pb2.EmbedResponse(
            request_id=result.request_id,
            model=result.model,
            embeddings=await _vectors_to_proto(result.vectors, raw.format),
            usage=usage_to_proto(result.usage),
            timing=timing_to_proto(result.timing),
            placement=placement_to_proto(result.placement),
        )

    async def _embed(self, raw: RawEncodeRequest, context: Any) -> EmbeddingResult:
        return await self._embedding.embed(
            raw, timeout_s=seconds_left(context), caller=caller_of(context), fallback_id=current_request_id()
        )

    async def EncodeStream(  # noqa: N802
        self, request_iterator: AsyncIterator[embedding_pb2.EncodeStreamRequest], context: Any
    ) -> AsyncIterator[embedding_pb2.EncodeStreamResponse]:
        formats: deque[EmbeddingFormat] = deque()  # of the requests that are in flight, in order

        async def requests() -> AsyncIterator[StreamRequest]:
            async for request in until_ending(request_iterator, self._draining):
                try:
                    check_encode_stream(request)
                    raw = encode_stream_request_from_proto(request)
                    formats.append(raw.format)
                    yield raw
                except TwinstageError as error:
                    formats.append(EmbeddingFormat.FLOAT)
                    yield error

        stream = EmbeddingStream(
            self._embedding,
            gate=self._gate,
            deadlines=self._deadlines,
            timeout_s=seconds_left(context),
            caller=caller_of(context),
        )
        async with contextlib.aclosing(stream.results(requests())) as results:
            index = 0
            async for result in results:
                for response in _stream_responses(index, result, formats.popleft()):
                    yield response
                index += 1


async def _vectors_to_proto(vectors: tuple[Vector, ...], format: EmbeddingFormat) -> list[embedding_pb2.Embedding]:
    def convert() -> list[embedding_pb2.Embedding]:
        return [
            embedding_to_proto(
                vector.data, index=index, prompt_tokens=vector.prompt_tokens, format=format, rows=vector.rows
            )
            for index, vector in enumerate(vectors)
        ]

    return convert() if sum(vector.rows for vector in vectors) <= LARGE_ANSWER else await asyncio.to_thread(convert)


def _stream_responses(
    index: int, result: StreamResult, format: EmbeddingFormat
) -> Iterator[embedding_pb2.EncodeStreamResponse]:
    """One response, or as many as keep each within PART_BYTES: a part has whole vectors, at least one."""
    try:
        if isinstance(result, Vector):
            yield from _embedding_responses(index, result, format)
            return
    except TwinstageError as error:
        result = error
    status = error_to_status(result)
    item_error = embedding_pb2.ItemError(code=status.code.value[0], message=status.message, reason=result.reason)
    yield embedding_pb2.EncodeStreamResponse(index=index, error=item_error)


def _embedding_responses(
    index: int, vector: Vector, format: EmbeddingFormat
) -> Iterator[embedding_pb2.EncodeStreamResponse]:
    row_bytes = len(vector.data) // vector.rows
    rows_per_part = max(1, PART_BYTES // row_bytes)
    for first in range(0, vector.rows, rows_per_part):
        rows = min(rows_per_part, vector.rows - first)
        data = vector.data[first * row_bytes : (first + rows) * row_bytes]
        embedding = embedding_to_proto(data, index=index, prompt_tokens=vector.prompt_tokens, format=format, rows=rows)
        more_follows = first + rows < vector.rows
        yield embedding_pb2.EncodeStreamResponse(index=index, embedding=embedding, more_follows=more_follows)
