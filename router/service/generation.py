"""GenerationService: one flow per call, streamed as it comes or collected to the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from router.generation import Generation, OpenCall
from router.outbox import DeltaEvent, FinishEvent, PromptEvent, PromptLogprobsEvent, SummaryEvent
from router.service.answers import Answers
from router.service.context import caller_of, seconds_left
from router.service.door import Door
from router.service.scores import in_parts, scores_to_proto
from twinstage.errors import InternalError
from twinstage.rpc.call_context import current_request_id
from twinstage.rpc.convert_public import (
    chat_request_from_proto,
    chat_result_to_proto,
    delta_to_proto,
    finished_to_proto,
    generate_request_from_proto,
    generation_result_to_proto,
    placement_to_proto,
    prompt_info_to_proto,
    summary_to_proto,
    timing_to_proto,
    usage_to_proto,
)
from twinstage.text.answers.joining import MessageJoiner
from twinstage.types import BatchPrompt, ChatMessage, Finish, ProducedToken, PromptLogprobs, RawGenerationRequest
from twinstage.v1 import generation_pb2, generation_pb2_grpc

LARGE_ANSWER = 1000  # log probabilities; each takes about 1.5 us to turn into a message

Result = TypeVar("Result")
StreamMessage = (
    generation_pb2.PromptInfo
    | generation_pb2.PromptLogprobs
    | generation_pb2.Delta
    | generation_pb2.Finished
    | generation_pb2.Summary
)


@dataclass(slots=True)
class _Continuation:
    """One continuation, as far as it has come. Of Generate, all of the text is the content of the message."""

    joiner: MessageJoiner = field(default_factory=MessageJoiner)
    tokens: list[ProducedToken] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A whole answer: its continuations in the order of their indices, and the log probabilities of its prompts."""

    call: OpenCall
    continuations: tuple[_Continuation, ...]
    summary: SummaryEvent
    scores: dict[int, list[PromptLogprobs]]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generate and Chat, unary and streamed."""

    def __init__(self, generation: Generation, door: Door) -> None:
        self._generation = generation
        self._door = door

    async def Generate(  # noqa: N802 - the names of methods are the proto's
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> generation_pb2.GenerateResponse:
        self._door.check_generate(request)
        raw = generate_request_from_proto(request)
        answer = await self._collect(raw, context)
        results = await convert_answer(_text_to_proto, answer, return_token_ids=raw.output.return_token_ids)
        return generation_pb2.GenerateResponse(
            request_id=answer.call.request_id,
            model=answer.call.model.name,
            results=results,
            usage=usage_to_proto(answer.summary.usage),
            timing=timing_to_proto(answer.summary.timing),
            placement=placement_to_proto(answer.summary.placement),
            prompt_logprobs=await _scores_to_proto(raw, answer),
        )

    async def Chat(  # noqa: N802
        self, request: generation_pb2.ChatRequest, context: Any
    ) -> generation_pb2.ChatResponse:
        self._door.check_chat(request)
        raw = chat_request_from_proto(request)
        answer = await self._collect(raw, context)
        results = await convert_answer(chat_result_to_proto, answer, return_token_ids=raw.output.return_token_ids)
        scores = await _scores_to_proto(raw, answer)
        return generation_pb2.ChatResponse(
            request_id=answer.call.request_id,
            model=answer.call.model.name,
            results=results,
            usage=usage_to_proto(answer.summary.usage),
            timing=timing_to_proto(answer.summary.timing),
            placement=placement_to_proto(answer.summary.placement),
            prompt_logprobs=scores[0] if scores else None,
        )

    async def GenerateStream(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        self._door.check_generate(request)
        async with contextlib.aclosing(self._stream(generate_request_from_proto(request), context)) as messages:
            async for message in messages:
                yield generation_pb2.GenerateStreamResponse(**{_FIELDS[type(message)]: message})  # type: ignore[arg-type]

    async def ChatStream(  # noqa: N802
        self, request: generation_pb2.ChatRequest, context: Any
    ) -> AsyncIterator[generation_pb2.ChatStreamResponse]:
        self._door.check_chat(request)
        async with contextlib.aclosing(self._stream(chat_request_from_proto(request), context)) as messages:
            async for message in messages:
                yield generation_pb2.ChatStreamResponse(**{_FIELDS[type(message)]: message})  # type: ignore[arg-type]

    async def _stream(self, raw: RawGenerationRequest, context: Any) -> AsyncGenerator[StreamMessage, None]:
        async with self._generation.open(
            raw,
            timeout_s=seconds_left(context),
            is_streamed=True,
            caller=caller_of(context),
            fallback_id=current_request_id(),
        ) as call:
            spell = call.model.tokenizer.spell
            answers = Answers()
            async for event in call.outbox.events():
                match event:
                    case PromptEvent():
                        answers = Answers(event.answer_format)
                        yield prompt_info_to_proto(
                            request_id=event.request_id, model=event.model, prompt_tokens=event.prompt_tokens
                        )
                    case PromptLogprobsEvent():
                        async for part in in_parts(event, spell):
                            yield part
                    case DeltaEvent():
                        yield delta_to_proto(
                            answers.delta(event.index, event.text),
                            event.tokens,
                            index=event.index,
                            return_token_ids=raw.output.return_token_ids,
                            spell=spell,
                        )
                    case FinishEvent():
                        rest, finish = answers.finish(event.index, event.finish)
                        if rest:
                            yield delta_to_proto(rest, (), index=event.index, return_token_ids=False, spell=spell)
                        yield finished_to_proto(finish, index=event.index)
                    case SummaryEvent():
                        yield summary_to_proto(usage=event.usage, timing=event.timing, placement=event.placement)

    async def _collect(self, raw: RawGenerationRequest, context: Any) -> _Answer:
        answers = Answers()
        continuations: defaultdict[int, _Continuation] = defaultdict(_Continuation)
        scores: defaultdict[int, list[PromptLogprobs]] = defaultdict(list)
        summary: SummaryEvent | None = None
        async with self._generation.open(
            raw,
            timeout_s=seconds_left(context),
            is_streamed=False,
            caller=caller_of(context),
            fallback_id=current_request_id(),
        ) as call:
            async for event in call.outbox.events():
                match event:
                    case PromptEvent():
                        answers = Answers(event.answer_format)
                    case PromptLogprobsEvent():
                        scores[event.prompt_index].append(event.logprobs)
                    case DeltaEvent():
                        continuation = continuations[event.index]
                        continuation.joiner.add_delta(answers.delta(event.index, event.text))
                        continuation.tokens += event.tokens
                    case FinishEvent():
                        continuation = continuations[event.index]
                        rest, continuation.finish = answers.finish(event.index, event.finish)
                        continuation.joiner.add_delta(rest)
                    case SummaryEvent():
                        summary = event
        if summary is None:
            raise InternalError("the request ended without a summary")
        ordered = tuple(continuation for _, continuation in sorted(continuations.items()))
        return _Answer(call=call, continuations=ordered, summary=summary, scores=scores)


async def convert_answer(to_proto: Callable[..., Result], answer: _Answer, *, return_token_ids: bool) -> list[Result]:
    """The results as messages; made on a thread when their log probabilities would hold up the event loop."""

    def convert() -> list[Result]:
        return [
            to_proto(
                continuation.joiner.message(),
                continuation.tokens,
                index=index,
                finish=continuation.finish,
                return_token_ids=return_token_ids,
                spell=answer.call.model.tokenizer.spell,
            )
            for index, continuation in enumerate(answer.continuations)
        ]

    tokens = (token for continuation in answer.continuations for token in continuation.tokens)
    num_logprobs = sum(1 + len(token.logprobs.top) for token in tokens if token.logprobs is not None)
    return convert() if num_logprobs <= LARGE_ANSWER else await asyncio.to_thread(convert)


async def _scores_to_proto(raw: RawGenerationRequest, answer: _Answer) -> list[generation_pb2.PromptLogprobs]:
    """One for each prompt, if they were asked for."""
    num_prompts = len(raw.prompt.prompts) if isinstance(raw.prompt, BatchPrompt) else 1
    is_asked = raw.output.prompt_logprobs is not None
    spell = answer.call.model.tokenizer.spell
    return await scores_to_proto(answer.scores, spell, num_prompts=num_prompts if is_asked else 0)


def _text_to_proto(
    message: ChatMessage, tokens: Sequence[ProducedToken], **options: Any
) -> generation_pb2.GenerationResult:
    return generation_result_to_proto(message.content, tokens, **options)


_FIELDS = {
    generation_pb2.PromptInfo: "prompt_info",
    generation_pb2.PromptLogprobs: "prompt_logprobs",
    generation_pb2.Delta: "delta",
    generation_pb2.Finished: "finished",
    generation_pb2.Summary: "summary",
}
