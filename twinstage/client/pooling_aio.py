"""The calls of pooling models, of the asyncio client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from typing import Any

import grpc

from twinstage.client import requests, responses, scoring
from twinstage.client.aio_stubs import AioStubs
from twinstage.client.channel import error_of
from twinstage.client.encodings import (
    EncodeStream,
    Encoding,
    Encodings,
    embedded_text,
    encode_request,
    encodings,
)
from twinstage.client.inputs import GenerationInput, OnePrompt
from twinstage.client.results import EmbeddedText, Embeddings, Ranking, Scores
from twinstage.types import PoolingParameters, PoolingTask, Truncation


class AsyncPoolingCalls:
    """Part of `AsyncTwinstageClient`, which has the connection."""

    address: str
    _stubs: AioStubs
    _call: Callable[..., Any]

    async def encode(
        self,
        inputs: GenerationInput,
        *,
        task: PoolingTask | None = None,
        model: str = "",
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncation: Truncation | None = None,
        prompt_name: str | None = None,
        parameters: Sequence[PoolingParameters] = (),
        timeout_s: float | None = None,
    ) -> Encodings:
        """Texts, or their token ids, through the model's own task, or another one: a vector per token, probabilities.

        `parameters` say for all inputs, or for each one, what the call itself leaves open.
        """
        own = PoolingParameters(
            task=task, truncation=truncation, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name
        )
        request = encode_request(inputs, own, model=model, parameters=parameters)
        return encodings(await self._call(self._stubs.embedding.Encode, request, timeout_s))

    async def encode_stream(
        self,
        inputs: Iterable[OnePrompt] | AsyncIterable[OnePrompt],
        *,
        task: PoolingTask | None = None,
        model: str = "",
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncation: Truncation | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Encoding, None]:
        """Encode as many inputs as there are, in order; each has its own result or error. Closing the iterator ends it.

        `inputs` is read as fast as results come; what it raises is raised after the results of the inputs before.
        """
        own = PoolingParameters(
            task=task, truncation=truncation, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name
        )
        stream = EncodeStream(own, model=model)
        call = self._stubs.embedding.EncodeStream(stream.async_requests(inputs), timeout=timeout_s)
        try:
            async for response in call:
                if (result := stream.result(response)) is not None:
                    yield result
            stream.finish()
        except grpc.RpcError as error:
            raise error_of(error, self.address, began=True) from error
        finally:
            call.cancel()

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        model: str = "",
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Embed texts, each after the prompt of that name. Without `truncation`, one that is too long is an error."""
        request = requests.embed_request(
            texts,
            model=model,
            normalize=normalize,
            dimensions=dimensions,
            truncation=truncation or Truncation(),
            prompt_name=prompt_name,
        )
        return responses.embeddings(await self._call(self._stubs.embedding.Embed, request, timeout_s))

    async def embed_stream(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        model: str = "",
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[EmbeddedText, None]:
        """Embed as many texts as there are, in order; each has its own vector or error. Closing the iterator ends it.

        `texts` is read as fast as vectors come; what it raises is raised after the vectors of the texts before.
        """
        results = self.encode_stream(
            texts,
            task=PoolingTask.EMBED,
            model=model,
            normalize=normalize,
            dimensions=dimensions,
            truncation=truncation,
            prompt_name=prompt_name,
            timeout_s=timeout_s,
        )
        async with contextlib.aclosing(results):
            async for result in results:
                yield embedded_text(result)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        *,
        model: str = "",
        truncation: Truncation | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """How well each document answers the query, or each its own."""
        request = scoring.score_request(queries, documents, model=model, truncation=truncation)
        return scoring.scores(await self._call(self._stubs.scoring.Score, request, timeout_s))

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        model: str = "",
        truncation: Truncation | None = None,
        timeout_s: float | None = None,
    ) -> Ranking:
        """The `top_n` documents (None: all) that answer the query best, best first."""
        request = scoring.rerank_request(query, documents, top_n=top_n, model=model, truncation=truncation)
        return scoring.ranking(await self._call(self._stubs.scoring.Rerank, request, timeout_s))
