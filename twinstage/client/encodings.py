"""Results of pooling models of every task, and the messages of Encode and EncodeStream from the client's side."""

from __future__ import annotations

import sys
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinstage.client.inputs import GenerationInput, OnePrompt, one_prompt, prompt_of
from twinstage.client.requests import refusing, truncation_to_proto
from twinstage.client.responses import summary
from twinstage.client.results import EmbeddedText, Summary
from twinstage.errors import InternalError, TwinstageError
from twinstage.rpc.convert_embedding import pooling_task_to_proto
from twinstage.rpc.status import error_from_reason
from twinstage.types import BatchPrompt, PoolingParameters, TokenPrompt
from twinstage.v1 import common_pb2, embedding_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What a pooling model makes of one input: arrays of 32-bit floats, or in a stream the error that it met.

    `rows` is one vector, or one per token, or the probabilities of the model's labels.
    """

    index: int
    rows: tuple[array[float], ...] = field(default=(), repr=False)
    prompt_tokens: int = 0
    error: TwinstageError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """One result per input, in order."""

    request_id: str
    model: str
    results: tuple[Encoding, ...] = field(repr=False)
    summary: Summary


@refusing()
def encode_request(
    inputs: GenerationInput, own: PoolingParameters, *, model: str, parameters: Sequence[PoolingParameters]
) -> embedding_pb2.EncodeRequest:
    given = prompt_of(inputs)
    return embedding_pb2.EncodeRequest(
        inputs=map(_input, given.prompts if isinstance(given, BatchPrompt) else (given,)),
        model=model,
        parameters=(embedding_pb2.EncodeParameters(**_parameters(entry)) for entry in parameters),
        format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32,
        **_parameters(own),
    )


def encodings(message: embedding_pb2.EncodeResponse) -> Encodings:
    return Encodings(
        request_id=message.request_id,
        model=message.model,
        results=tuple(
            Encoding(index=entry.index, rows=_rows(entry), prompt_tokens=entry.prompt_tokens)
            for entry in message.embeddings
        ),
        summary=summary(message),
    )


class EncodeStream:
    """The messages of one stream. What reading the inputs raises ends it after the inputs before; see `finish`."""

    def __init__(self, own: PoolingParameters, *, model: str) -> None:
        with refusing():
            self._options = embedding_pb2.EncodeStreamRequest(
                model=model, format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32, **_parameters(own)
            )
        self._rows: list[array[float]] = []
        self._failure: Exception | None = None

    def requests(self, inputs: Iterable[OnePrompt]) -> Iterator[embedding_pb2.EncodeStreamRequest]:
        try:
            yield from map(self._request, (inputs,) if isinstance(inputs, str) else inputs)
        except Exception as error:  # gRPC reads on a thread of its own, and would tell its log alone
            self._failure = error

    async def async_requests(
        self, inputs: Iterable[OnePrompt] | AsyncIterable[OnePrompt]
    ) -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
        try:
            if isinstance(inputs, AsyncIterable):
                async for entry in inputs:
                    yield self._request(entry)
            else:
                for request in self.requests(inputs):
                    yield request
        except Exception as error:  # as above
            self._failure = error

    @refusing()
    def _request(self, entry: OnePrompt) -> embedding_pb2.EncodeStreamRequest:
        request = embedding_pb2.EncodeStreamRequest(input=_input(entry))
        request.MergeFrom(self._options)
        return request

    def result(self, response: embedding_pb2.EncodeStreamResponse) -> Encoding | None:
        """The result that is complete with this response, if one is."""
        if response.HasField("error"):
            error = error_from_reason(response.error.reason, response.error.message)
            self._rows = []
            return Encoding(index=response.index, error=error)
        self._rows += _rows(response.embedding)
        if response.more_follows:
            return None
        rows, self._rows = tuple(self._rows), []
        return Encoding(index=response.index, rows=rows, prompt_tokens=response.embedding.prompt_tokens)

    def finish(self) -> None:
        """Call it when the responses are over. Raises what reading the inputs raised."""
        if self._failure is not None:
            raise self._failure


def embedded_text(encoding: Encoding) -> EmbeddedText:
    """The same for EMBED."""
    vector = tuple(encoding.rows[0]) if encoding.rows else ()
    return EmbeddedText(index=encoding.index, vector=vector, prompt_tokens=encoding.prompt_tokens, error=encoding.error)


def _input(entry: OnePrompt) -> embedding_pb2.EncodeInput:
    prompt = one_prompt(entry)
    if isinstance(prompt, TokenPrompt):
        return embedding_pb2.EncodeInput(token_ids=common_pb2.TokenIds(ids=prompt.token_ids))
    return embedding_pb2.EncodeInput(text=prompt.text)


def _parameters(parameters: PoolingParameters) -> dict[str, Any]:
    """Fields that the messages share; what is not said is left out."""
    truncation = parameters.truncation
    return {
        "task": pooling_task_to_proto(parameters.task),
        "truncation": truncation_to_proto(truncation) if truncation is not None else None,
        "normalize": parameters.normalize,
        "dimensions": parameters.dimensions,
        "prompt_name": parameters.prompt_name,
    }


def _rows(message: embedding_pb2.Embedding) -> tuple[array[float], ...]:
    numbers = array("f", message.packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    size = message.dimensions
    if size * max(1, message.rows) != len(numbers):
        raise InternalError(f"the router sent {len(numbers)} numbers for {message.rows} rows of {size}")
    return tuple(numbers[start : start + size] for start in range(0, len(numbers), size))
