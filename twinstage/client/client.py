"""The blocking client.

    with TwinstageClient("localhost:50051") as client:
        print(client.generate("The capital of France is").text)
        with client.chat_stream("Tell me a story.") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.summary.usage)

Every method raises errors from `twinstage.errors`. Calls may be made from several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import grpc

from twinstage.addresses import DEFAULT_PORT, with_default_port
from twinstage.client import requests, responses
from twinstage.client.channel import CHANNEL_OPTIONS, error_of, our_errors
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

ADMIN_TIMEOUT_S = 10.0


class StreamingCall(Protocol):
    """The part of a gRPC call that a stream uses."""

    def __iter__(self) -> Iterator[StreamEvent]: ...

    def cancel(self) -> None: ...


class GenerationStream:
    """A running generation: iterate over its deltas. Leaving the scope early cancels it.

    `prompt_info` is known once the first delta is, `summary` when the iteration has ended.
    """

    def __init__(self, call: StreamingCall, address: str) -> None:
        self._call = call
        self._events = iter(call)
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

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                event = next(self._events)
            except StopIteration:
                self._state.check_complete()
                raise
            except grpc.RpcError as error:
                raise error_of(error, self._address, began=self._state.began) from error
            delta = self._state.take(event)
            if delta is not None:
                return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()


class TwinstageClient:
    """A connection to a router at `address` ("host:port", by default port 50051), made when the first call needs it."""

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
        self._channel = access.open(self.address, CHANNEL_OPTIONS)
        channel = access.authorized(self._channel)
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._models = model_pb2_grpc.ModelServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)

    def generate(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> Generation:
        """Continue one prompt or a batch of them."""
        with our_errors(self.address):
            response = self._generation.Generate(requests.generate_request(prompt, options), timeout=options.timeout_s)
        return responses.generation(response)

    def generate_stream(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> GenerationStream:
        """Continue a prompt; text comes as it is generated."""
        request = requests.generate_request(prompt, options)
        return GenerationStream(self._generation.GenerateStream(request, timeout=options.timeout_s), self.address)

    def chat(
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
            return responses.chat(self._generation.Chat(request, timeout=options.timeout_s))

    def chat_stream(
        self,
        conversation: ChatInput,
        options: Options = DEFAULT_OPTIONS,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoiceInput = None,
    ) -> GenerationStream:
        """Answer a conversation; text, reasoning and tool calls come as they are generated."""
        request = requests.chat_request(conversation, options, tools=tools, tool_choice=tool_choice)
        return GenerationStream(self._generation.ChatStream(request, timeout=options.timeout_s), self.address)

    def embed(
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
            return responses.embeddings(self._embedding.Embed(request, timeout=timeout_s))

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text, as a prompt would have them."""
        request = tokenizer_pb2.TokenizeRequest(text=text, model=model, add_special_tokens=add_special_tokens)
        with our_errors(self.address):
            response = self._tokenizer.Tokenize(request, timeout=ADMIN_TIMEOUT_S)
        return tuple(response.token_ids)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that the router knows."""
        with our_errors(self.address):
            response = self._admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.worker, response.workers))

    def reset_prefix_cache(self, *, model: str = "", worker_id: str = "") -> tuple[PrefixCacheReset, ...]:
        """Let all workers forget earlier prompts and answers, or those of one model, or one worker."""
        request = admin_pb2.ResetPrefixCacheRequest(model=model, worker_id=worker_id)
        with our_errors(self.address):
            response = self._admin.ResetPrefixCache(request, timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.prefix_cache_reset, response.workers))

    def drain_worker(self, worker_id: str, *, wait: bool = False, timeout_s: float | None = None) -> WorkerInfo:
        """Let a worker finish what it has and take nothing new; with `wait`, return once nothing is left on it.

        Raises DeadlineExceeded when something is left after `timeout_s`; the worker goes on draining.
        """
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, wait=wait)
        timeout_s = timeout_s if wait else timeout_s or ADMIN_TIMEOUT_S
        with our_errors(self.address):
            response = self._admin.DrainWorker(request, timeout=timeout_s)
        return responses.worker(response.worker)

    def undrain_worker(self, worker_id: str) -> WorkerInfo:
        """Let a draining worker take requests again."""
        request = admin_pb2.UndrainWorkerRequest(worker_id=worker_id)
        with our_errors(self.address):
            response = self._admin.UndrainWorker(request, timeout=ADMIN_TIMEOUT_S)
        return responses.worker(response.worker)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        with our_errors(self.address):
            response = self._models.ListModels(model_pb2.ListModelsRequest(), timeout=ADMIN_TIMEOUT_S)
        return tuple(map(responses.model, response.models))

    def close(self) -> None:
        """End the connection and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
