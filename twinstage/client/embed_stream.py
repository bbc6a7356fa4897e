"""Embedding a stream of texts: as many as there are, a bounded number of them on the way at any time."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from twinstage.client.requests import encode_stream_request
from twinstage.client.results import EmbeddedText
from twinstage.rpc.status import error_from_reason
from twinstage.types import Truncation
from twinstage.v1 import embedding_pb2


class EmbedStream:
    """What one stream asks for, and what its responses mean."""

    def __init__(
        self,
        *,
        model: str,
        normalize: bool,
        dimensions: int | None,
        truncation: Truncation | None,
        prompt_name: str | None,
    ) -> None:
        self._options = encode_stream_request(
            model=model,
            normalize=normalize,
            dimensions=dimensions,
            truncation=truncation or Truncation(),
            prompt_name=prompt_name,
        )

    def _request(self, text: str) -> embedding_pb2.EncodeStreamRequest:
        request = embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text=text))
        request.MergeFrom(self._options)
        return request

    def requests(self, texts: Iterable[str]) -> Iterator[embedding_pb2.EncodeStreamRequest]:
        return map(self._request, (texts,) if isinstance(texts, str) else texts)

    async def async_requests(
        self, texts: Iterable[str] | AsyncIterable[str]
    ) -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
        if isinstance(texts, AsyncIterable):
            async for text in texts:
                yield self._request(text)
        else:
            for request in self.requests(texts):
                yield request

    @staticmethod
    def result(response: embedding_pb2.EncodeStreamResponse) -> EmbeddedText:
        if response.HasField("error"):
            error = error_from_reason(response.error.reason, response.error.message)
            return EmbeddedText(index=response.index, error=error)
        packed = response.embedding.packed
        return EmbeddedText(
            index=response.index,
            vector=struct.unpack(f"<{len(packed) // 4}f", packed),
            prompt_tokens=response.embedding.prompt_tokens,
        )
