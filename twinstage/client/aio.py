"""The asyncio client: the methods of `TwinstageClient`, awaitable.

async with AsyncTwinstageClient("localhost:50051") as client:
    async with client.chat_stream("Tell me a story.") as stream:
        async for delta in stream:
            print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from twinstage.addresses import DEFAULT_PORT, with_default_port
from twinstage.client import requests, responses
from twinstage.client.channel import CHANNEL_OPTIONS, error_of, our_errors
from twinstage.client.client import ADMIN_TIMEOUT_S
from twinstage.client.options import DEFAULT_OPTIONS, Options
from twinstage.client.requests import ChatInput, GenerationInput, ToolChoiceInput
from twinstage.client.results import (
    Delta,
    Embeddings,
    Generation,
    ModelInfo,
    PrefixCacheReset,
    PromptInfo,
    PromptLogprobs,
    Summary,
    WorkerInfo,
)
from twinstage.client.stream_state import StreamEvent, StreamState
from twinstage.errors import Cancelled
from twinstage.rpc.access import Access
from twinstage.types import ChatMessage, Tool, Truncation
from twinstage.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    embedding_pb2_grpc,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)


class AsyncGenerationStream:
    """A running generation: iterate over its deltas. Leaving the scope early cancels it."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._events = aiter(call)
        self._address = address
        self._state = StreamState()

    @property
    def prompt_info(self) -> PromptInfo | None:
        return self._state.prompt_info

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Those that came so far: in parts, each before the first delta."""
        return tuple(self._state.prompt_logprobs)

    @property
    def summary(self) -> Summary | None:
        return self._state.summary

    def message(self, index: int = 0) -> ChatMessage:
        """What has come of an answer, as a message that can be sent back once the stream has ended."""
        return self._state.message(index)

    def cancel(self) -> None:
        """Tell the router that nobody waits any more; harmless when the stream has ended."""
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            delta = self._state.take(await self._next_event())
            if delta is not None:
                return delta

    async def _next_event(self) -> StreamEvent:
        try:
            event: StreamEvent = await anext(self._events)
        except StopAsyncIteration:
            self._state.check_complete()
            raise
        except grpc.RpcError as error:
            raise error_of(error, self._address, began=self._state.began) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the stream was cancelled") from error  # by our own `cancel`: the task goes on
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncTwinstageClient:
    """A connection to a router at `address` ("host:port", by default port 50051), for one event loop."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        server_name: str = "",
    ) -> None:
        """Over TLS with `credentials` (see `tls_credentials`); `token` is sent with every call.

        `server_name` is the name in the router's certificate, where it is not the host of its address.
        """
        self.address = with_default_port(address, DEFAULT_PORT)
        access = Access(credentials=credentials, token=token, server_name=server_name)
        self._channel = access.open_aio(self.address, CHANNEL_OPTIONS)
        # The generated stubs are typed for blocking channels.
        channel: Any = access.authorized(self._channel)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._embedding: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self._tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(channel)

    async def generate(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> Generation:
        """Continue one prompt or a batch of them."""
        request = requests.generate_request(prompt, options)
        with our_errors(self.address):
            return responses.generation(await self._generation.Generate(request, timeout=options.timeout_s))

    def generate_stream(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> AsyncGenerationStream:
        """Continue a prompt; text comes as it is generated."""
        request = requests.generate_request(prompt, options)
        return AsyncGenerationStream(self._generation.GenerateStream(request, timeout=options.timeout_s), self.address)

    async def chat(
        self,
        conversation: ChatInput,
        options: Options = DEFAULT_OPTIONS,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoiceInput = None,
    ) -> Generation:
        """Answer a conversation; a string is one message of the user.

        `tools` may be called, as `tool_choice` has it: "auto", "none", "required", or a `ToolChoice` of one of them.
        """
        request = requests.chat_request(conversation, options, tools=tools, tool_choice=tool_choice)
        with our_errors(self.address):
            return responses.chat(await self._generation.Chat(request, timeout=options.timeout_s))

    def chat_stream(
        self,
        conversation: ChatInput,
        options: Options = DEFAULT_OPTIONS,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoiceInput = None,
    ) -> AsyncGenerationStream:
        """Answer a conversation; text, reasoning and tool calls come as they are generated."""
        request = requests.chat_request(conversation, options, tools=tools, tool_choice=tool_choice)
        return AsyncGenerationStream(self._generation.ChatStream(request, timeout=options.timeout_s), self.address)

    async def embed(
        self,
        texts: Sequence[str],
        *,
        model: str = "",
        normalize: bool = True,
        dimensions: int | None = None,
        truncation: Truncation | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Embed texts. Without `truncation`, a text that is too long is an error."""
        request = requests.embed_request(
            texts, model=model, normalize=normalize, dimensions=dimensions, truncation=truncation or Truncation()
        )
        with our_errors(self.address):
            return responses.embeddings(await self._embedding.Embed(request, timeout=timeout_s))

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text, as a prompt would have them."""
        request = tokenizer_pb2.TokenizeRequest(text=text, model=model, add_special_tokens=add_special_tokens)
        with our_errors(self.address):
            response = await self._tokenizer.Tokenize(request, timeout=ADMIN_TIMEOUT_S)
        return tuple(response.token_ids)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that the router knows."""
        with our_errors(self.address):
            response = await self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.worker, response.workers))

    async def reset_prefix_cache(self, *, model: str = "", worker_id: str = "") -> tuple[PrefixCacheReset, ...]:
        """Let all workers forget earlier prompts and answers, or those of one model, or one worker."""
        request = admin_pb2.ResetPrefixCacheRequest(model=model, worker_id=worker_id)
        with our_errors(self.address):
            response = await self._admin.ResetPrefixCache(request, timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.prefix_cache_reset, response.workers))

    async def drain_worker(self, worker_id: str, *, wait: bool = False, timeout_s: float | None = None) -> WorkerInfo:
        """Let a worker finish what it has and take nothing new; with `wait`, return once nothing is left on it.

        Raises DeadlineExceeded when something is left after `timeout_s`; the worker goes on draining.
        """
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, wait=wait)
        timeout_s = timeout_s if wait else timeout_s or ADMIN_TIMEOUT_S
        with our_errors(self.address):
            response = await self._admin.DrainWorker(request, timeout=timeout_s)
        return responses.worker(response.worker)

    async def undrain_worker(self, worker_id: str) -> WorkerInfo:
        """Let a draining worker take requests again."""
        request = admin_pb2.UndrainWorkerRequest(worker_id=worker_id)
        with our_errors(self.address):
            response = await self._admin.UndrainWorker(request, timeout=ADMIN_TIMEOUT_S)
        return responses.worker(response.worker)

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        with our_errors(self.address):
            response = await self._models.ListModels(model_pb2.ListModelsRequest(), timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.model, response.models))

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
