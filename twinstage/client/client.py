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

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from twinstage.addresses import DEFAULT_PORT, with_default_port
from twinstage.client import admin_responses, requests, responses
from twinstage.client.channel import CHANNEL_OPTIONS, error_of
from twinstage.client.inputs import ChatInput, GenerationInput, ToolChoiceInput
from twinstage.client.options import DEFAULT_OPTIONS, Options
from twinstage.client.pooling import PoolingCalls
from twinstage.client.results import (
    Generation,
    Load,
    ModelInfo,
    PrefixCacheReset,
    RenderedChat,
    Trace,
    WorkerInfo,
)
from twinstage.client.retry import DEFAULT_RETRIES, Attempts
from twinstage.client.stream import GenerationStream
from twinstage.rpc.access import Access
from twinstage.types import Tool
from twinstage.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    embedding_pb2_grpc,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    scoring_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

ADMIN_TIMEOUT_S = 10.0


class TwinstageClient(PoolingCalls):
    """A connection to a router at `address` ("host:port", by default port 50051), made when the first call needs it."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        server_name: str = "",
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        """Over TLS with `credentials` (see `tls_credentials`); `token` is sent with every call.

        `server_name` is the name in the router's certificate, where it is not the host of its address. A call is made
        up to `retries` times more while the router's status says when to come back, within the call's timeout.
        """
        self._retries = retries
        self.address = with_default_port(address, DEFAULT_PORT)
        access = Access(credentials=credentials, token=token, server_name=server_name)
        self._channel = access.open(self.address, CHANNEL_OPTIONS)
        channel = access.authorized(self._channel)
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self._scoring = scoring_pb2_grpc.ScoringServiceStub(channel)
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._models = model_pb2_grpc.ModelServiceStub(channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(channel)

    def generate(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> Generation:
        """Continue one prompt or a batch of them."""
        request = requests.generate_request(prompt, options)
        return responses.generation(self._call(self._generation.Generate, request, options.timeout_s))

    def generate_stream(self, prompt: GenerationInput, options: Options = DEFAULT_OPTIONS) -> GenerationStream:
        """Continue a prompt; text comes as it is generated."""
        request = requests.generate_request(prompt, options)
        return self._stream(self._generation.GenerateStream, request, options.timeout_s)

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
        return responses.chat(self._call(self._generation.Chat, request, options.timeout_s))

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
        return self._stream(self._generation.ChatStream, request, options.timeout_s)

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> tuple[int, ...]:
        """The token ids of a text, as a prompt would have them."""
        request = tokenizer_pb2.TokenizeRequest(text=text, model=model, add_special_tokens=add_special_tokens)
        return tuple(self._call(self._tokenizer.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._tokenizer.Detokenize, request).text)

    def render_chat(
        self,
        conversation: ChatInput,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoiceInput = None,
        model: str = "",
    ) -> RenderedChat:
        """The exact prompt that `chat` would use, as text and as token ids."""
        request = requests.render_request(conversation, model, tools=tools, tool_choice=tool_choice)
        return responses.rendered(self._call(self._tokenizer.RenderChat, request))

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        response = self._call(self._models.ListModels, model_pb2.ListModelsRequest())
        return tuple(map(responses.model, response.models))

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers that the router knows."""
        response = self._call(self._admin.ListWorkers, admin_pb2.ListWorkersRequest())
        return tuple(map(responses.worker, response.workers))

    def load(self) -> Load:
        """How much there is to do now."""
        return admin_responses.load(self._call(self._admin.GetLoad, admin_pb2.GetLoadRequest()).load)

    def watch_load(self, *, interval_s: float = 1.0) -> Iterator[Load]:
        """The load, at once and then every interval. Closing the iterator ends it."""
        call: Any = self._admin.WatchLoad(requests.watch_load_request(interval_s))
        try:
            for response in call:
                yield admin_responses.load(response.load)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        finally:
            call.cancel()

    def trace(self, request_id: str) -> Trace:
        """What happened to a request, and when. Raises NotFound."""
        request = admin_pb2.GetTraceRequest(request_id=request_id)
        return admin_responses.trace(self._call(self._admin.GetTrace, request).trace)

    def abort(self, request_id: str) -> None:
        """End a request of anybody; its answer ends with what there is. Raises NotFound."""
        self._call(self._admin.AbortRequest, admin_pb2.AbortRequestRequest(request_id=request_id))

    def reset_prefix_cache(self, *, model: str = "", worker_id: str = "") -> tuple[PrefixCacheReset, ...]:
        """Let all workers forget earlier prompts and answers, or those of one model, or one worker."""
        request = admin_pb2.ResetPrefixCacheRequest(model=model, worker_id=worker_id)
        return tuple(map(responses.prefix_cache_reset, self._call(self._admin.ResetPrefixCache, request).workers))

    def drain_worker(self, worker_id: str, *, wait: bool = False, timeout_s: float | None = None) -> WorkerInfo:
        """Let a worker finish what it has and take nothing new; with `wait`, return once nothing is left on it.

        Raises DeadlineExceeded when something is left after `timeout_s`; the worker goes on draining.
        """
        request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, wait=wait)
        timeout_s = timeout_s if wait else timeout_s or ADMIN_TIMEOUT_S
        return responses.worker(self._call(self._admin.DrainWorker, request, timeout_s).worker)

    def undrain_worker(self, worker_id: str) -> WorkerInfo:
        """Let a draining worker take requests again."""
        request = admin_pb2.UndrainWorkerRequest(worker_id=worker_id)
        return responses.worker(self._call(self._admin.UndrainWorker, request).worker)

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None = ADMIN_TIMEOUT_S) -> Any:
        """One unary call, made again as its status says."""
        attempts = Attempts(self._retries, timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.timeout_s)
            except grpc.RpcError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise error_of(error, self.address) from error
            time.sleep(pause_s)

    def _stream(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> GenerationStream:
        attempts = Attempts(self._retries, timeout_s)
        return GenerationStream(lambda left_s: method(request, timeout=left_s), attempts, self.address)

    def close(self) -> None:
        """End the connection and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
