"""Makes calls and keeps everything that came back; how pooling models are called is in `pooling`."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from chaos import pooling
from chaos.cases import AnsweredCase, Case
from chaos.schedule import Call
from token_bits import TokenBits, bits_of_received
from twinstage.v1 import common_pb2, embedding_pb2, generation_pb2, generation_pb2_grpc

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(slots=True, kw_only=True)
class Failure:
    """A status other than OK. `reason` is empty when gRPC made the status and not the service."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    has_retry_info: bool = False
    tokens_sent: int | None = None


@dataclass(slots=True, kw_only=True)
class Received:
    """What a client got, in whatever pieces. `event_times` are those of streamed events with tokens or vectors."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_other_tokens: int = 0  # of choices that are not observed
    bits: list[TokenBits] = field(default_factory=list)
    prompt_bits: list[TokenBits] = field(default_factory=list)
    vectors: dict[int, pooling.Vector] = field(default_factory=dict)  # by input
    item_failures: dict[int, embedding_pb2.ItemError] = field(default_factory=dict)  # of a stream of inputs
    finishes: list[tuple[int, common_pb2.MatchedStop]] = field(default_factory=list)
    usage: common_pb2.Usage | None = None
    placement: common_pb2.Placement | None = None
    prompt_tokens: int | None = None
    num_summaries: int = 0
    disorder: list[str] = field(default_factory=list)
    event_times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return len(self.token_ids) + self.num_other_tokens

    def forget_content(self) -> None:
        """Keep the numbers alone: a long run makes many calls."""
        self.text, self.token_ids, self.bits, self.prompt_bits, self.vectors = "", [], [], [], {}


@dataclass(slots=True, kw_only=True)
class Observation:
    """A call that has ended. `failure` is None when its status was OK. Times are of the monotonic clock."""

    seed: int
    call: Call
    began_s: float
    ended_s: float
    received: Received
    failure: Failure | None

    @property
    def outcome(self) -> str:
        return "OK" if self.failure is None else self.failure.code.name


async def make_call(channel: grpc.aio.Channel, call: Call, answered: AnsweredCase, *, seed: int) -> Observation:
    """Make one call, and cancel it when its client loses interest. Never raises what the service does."""
    began_s, received = time.monotonic(), Received()
    rpc = _open_call(channel, call, answered)
    cancel = None
    if call.cancel_after_s is not None:
        cancel = asyncio.get_running_loop().call_later(call.cancel_after_s, rpc.cancel)
    failure = None
    try:
        if not isinstance(answered.case, Case):
            await pooling.take(rpc, received, answered.case, is_streamed=call.is_streamed)
        elif call.is_streamed:
            async for event in rpc:
                _take_event(received, event, answered.case)
        else:
            _take_response(received, await rpc, answered.case)
    except grpc.aio.AioRpcError as error:
        failure = failure_of(error)
    except asyncio.CancelledError:
        if not rpc.cancelled():
            raise
        failure = Failure(code=grpc.StatusCode.CANCELLED, message="cancelled by the client")
    finally:
        if cancel is not None:
            cancel.cancel()
    return Observation(
        seed=seed, call=call, began_s=began_s, ended_s=time.monotonic(), received=received, failure=failure
    )


def _open_call(channel: grpc.aio.Channel, call: Call, answered: AnsweredCase) -> Any:
    if not isinstance(answered.case, Case):
        return pooling.open_call(channel, answered.case, is_streamed=call.is_streamed, timeout_s=call.deadline_s)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    method = stub.GenerateStream if call.is_streamed else stub.Generate
    return method(answered.case.request(), timeout=call.deadline_s)


def _take_response(received: Received, response: generation_pb2.GenerateResponse, case: Case) -> None:
    for part in response.prompt_logprobs:
        _take_prompt_logprobs(received, part, case)
    for index, result in enumerate(response.results):
        if result.index != index:
            received.disorder.append(f"result {result.index} at place {index}")
        if index != case.observed:
            received.num_other_tokens += len(result.token_ids)
            continue
        received.text += result.text
        received.token_ids += result.token_ids
        received.bits += bits_of_received(result.logprobs)
        received.finishes.append((result.finish_reason, result.matched_stop))
    received.usage, received.placement = response.usage, response.placement
    received.num_summaries = 1


def _take_prompt_logprobs(received: Received, part: generation_pb2.PromptLogprobs, case: Case) -> None:
    if part.prompt_index != case.observed_prompt:
        return
    if received.token_ids:
        received.disorder.append("prompt log probabilities after a token")
    if part.tokens and part.start != 1 + len(received.prompt_bits):
        received.disorder.append(f"prompt log probabilities from {part.start} on after {len(received.prompt_bits)}")
    received.prompt_bits += bits_of_received(part.tokens)


def _is_of_another(event: generation_pb2.GenerateStreamResponse, case: Case) -> bool:
    """Whether an event is that of a continuation, or of a prompt, which is not observed."""
    match event.WhichOneof("event"):
        case "delta":
            return event.delta.index != case.observed
        case "finished":
            return event.finished.index != case.observed
        case "prompt_logprobs":
            return event.prompt_logprobs.prompt_index != case.observed_prompt
        case _:
            return False


def _take_event(received: Received, event: generation_pb2.GenerateStreamResponse, case: Case) -> None:
    """Events come as prompt_info, deltas, finished, summary; those of continuations come between one another."""
    kind = event.WhichOneof("event")
    if _is_of_another(event, case):
        received.num_other_tokens += len(event.delta.token_ids)
        if received.prompt_tokens is None or received.num_summaries:
            received.disorder.append(f"{kind} of another choice at the wrong place")
        return
    if received.num_summaries or (received.finishes and kind != "summary"):
        received.disorder.append(f"{kind} after the end")
    if (received.prompt_tokens is None) != (kind == "prompt_info"):
        received.disorder.append(f"{kind} at the wrong place")
    match kind:
        case "prompt_info":
            received.prompt_tokens = event.prompt_info.prompt_tokens
        case "prompt_logprobs":
            _take_prompt_logprobs(received, event.prompt_logprobs, case)
        case "delta":
            received.text += event.delta.text
            received.token_ids += event.delta.token_ids
            received.bits += bits_of_received(event.delta.logprobs)
            received.event_times.append(time.monotonic())
        case "finished":
            received.finishes.append((event.finished.finish_reason, event.finished.matched_stop))
        case "summary":
            received.num_summaries += 1
            received.usage, received.placement = event.summary.usage, event.summary.placement
        case _:
            received.disorder.append("an empty event")


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """The status with the details that clients rely on."""
    failure = Failure(code=error.code(), message=(error.details() or "")[:300])
    metadata = cast("Iterable[tuple[str, Any]]", error.trailing_metadata() or ())
    for packed in status_pb2.Status.FromString(dict(metadata).get(_DETAILS_KEY, b"")).details:
        if packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            failure.has_retry_info = True
        elif packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(packed.value)
            failure.reason = info.reason
            if "tokens_sent" in info.metadata:
                failure.tokens_sent = int(info.metadata["tokens_sent"])
    return failure
