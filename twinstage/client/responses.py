"""From messages of the public API to the client's results."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from twinstage.client.results import (
    Continuation,
    Delta,
    Embeddings,
    Generation,
    ModelInfo,
    PrefixCacheReset,
    PromptInfo,
    PromptLogprobs,
    RenderedChat,
    Summary,
    TokenAlternativeText,
    TokenText,
    WorkerInfo,
)
from twinstage.errors import InternalError
from twinstage.rpc.convert_chat import message_from_proto, tool_call_deltas_from_proto
from twinstage.rpc.convert_values import seconds_from_proto
from twinstage.types import Finish, FinishReason, Placement, Role, Task, Timing, Usage
from twinstage.v1 import admin_pb2, common_pb2, embedding_pb2, generation_pb2, model_pb2, scoring_pb2, tokenizer_pb2

_ROLES = {admin_pb2.WORKER_ROLE_PREFILL: Role.PREFILL, admin_pb2.WORKER_ROLE_DECODE: Role.DECODE}
_TASKS = {
    model_pb2.MODEL_TASK_GENERATE: Task.GENERATE,
    model_pb2.MODEL_TASK_EMBED: Task.EMBED,
    model_pb2.MODEL_TASK_SCORE: Task.SCORE,
    model_pb2.MODEL_TASK_CLASSIFY: Task.CLASSIFY,
}
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CONTEXT_LIMIT: FinishReason.CONTEXT_LIMIT,
    common_pb2.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
    common_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    common_pb2.FINISH_REASON_REPETITION: FinishReason.REPETITION,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


def prompt_info(message: generation_pb2.PromptInfo) -> PromptInfo:
    return PromptInfo(request_id=message.request_id, model=message.model, prompt_tokens=message.prompt_tokens)


def delta(message: generation_pb2.Delta) -> Delta:
    return Delta(
        index=message.index,
        text=message.text,
        reasoning=message.reasoning,
        tool_calls=tool_call_deltas_from_proto(message.tool_calls),
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
    )


def finished(message: generation_pb2.Finished) -> Delta:
    """The end of a continuation, as an empty delta that carries it."""
    return Delta(index=message.index, finish=_finish(message))


def generation(message: generation_pb2.GenerateResponse) -> Generation:
    results = tuple(
        Continuation(
            index=result.index,
            text=result.text,
            token_ids=tuple(result.token_ids),
            logprobs=_logprobs(result.logprobs),
            finish=_finish(result),
        )
        for result in message.results
    )
    return Generation(
        request_id=message.request_id,
        model=message.model,
        results=results,
        summary=summary(message),
        prompt_logprobs=tuple(prompt_logprobs(part) for part in message.prompt_logprobs),
    )


def chat(message: generation_pb2.ChatResponse) -> Generation:
    results = tuple(
        Continuation(
            index=result.index,
            text=result.message.content,
            message=message_from_proto(result.message),
            token_ids=tuple(result.token_ids),
            logprobs=_logprobs(result.logprobs),
            finish=_finish(result),
        )
        for result in message.results
    )
    return Generation(
        request_id=message.request_id,
        model=message.model,
        results=results,
        summary=summary(message),
        prompt_logprobs=(prompt_logprobs(message.prompt_logprobs),) if message.HasField("prompt_logprobs") else (),
    )


def prompt_logprobs(message: generation_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(prompt_index=message.prompt_index, start=message.start, tokens=_logprobs(message.tokens))


def embeddings(message: embedding_pb2.EmbedResponse) -> Embeddings:
    return Embeddings(
        request_id=message.request_id,
        model=message.model,
        vectors=tuple(_vector(embedding) for embedding in message.embeddings),
        summary=summary(message),
    )


def worker(message: admin_pb2.Worker) -> WorkerInfo:
    return WorkerInfo(
        worker_id=message.id,
        address=message.address,
        role=_ROLES.get(message.role),
        state=_state_name(message.state),
        model=message.model,
        total_kv_blocks=message.total_kv_blocks,
        free_kv_blocks=message.free_kv_blocks,
        running=message.running,
        waiting=message.waiting,
        finished=message.finished,
        kv_bytes_received=message.kv_bytes_received,
        transports=tuple(message.transports),
        detail=message.detail,
        cached_kv_blocks=message.cached_kv_blocks,
        prefix_looked_up_blocks=message.prefix_looked_up_blocks,
        prefix_found_blocks=message.prefix_found_blocks,
        unfinished=message.unfinished,
        leaked_kv_blocks=message.leaked_kv_blocks,
    )


def prefix_cache_reset(message: admin_pb2.PrefixCacheReset) -> PrefixCacheReset:
    return PrefixCacheReset(worker_id=message.worker_id, dropped_blocks=message.dropped_blocks)


def model(message: model_pb2.Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        task=_TASKS.get(message.task),
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        fingerprint=message.fingerprint,
        embedding_dimensions=message.embedding_dimensions,
        prefill_workers=message.prefill_workers,
        decode_workers=message.decode_workers,
        ready=message.ready,
        capabilities=tuple(map(_capability_name, message.capabilities)),
        labels=tuple(message.labels),
    )


def rendered(message: tokenizer_pb2.RenderChatResponse) -> RenderedChat:
    return RenderedChat(text=message.text, token_ids=tuple(message.token_ids))


def _capability_name(capability: model_pb2.ModelCapability.ValueType) -> str:
    """In small letters; a newer router may know more than this client."""
    known = capability in model_pb2.ModelCapability.values()
    name = model_pb2.ModelCapability.Name(capability) if known else f"capability {capability}"
    return name.removeprefix("MODEL_CAPABILITY_").lower()


def _state_name(state: admin_pb2.WorkerState.ValueType) -> str:
    """The state in small letters; a newer router may know more states than this client."""
    name = admin_pb2.WorkerState.Name(state) if state in admin_pb2.WorkerState.values() else f"state {state}"
    return name.removeprefix("WORKER_STATE_").lower()


def _vector(message: embedding_pb2.Embedding) -> tuple[float, ...]:
    if message.packed:
        return struct.unpack(f"<{len(message.packed) // 4}f", message.packed)
    return tuple(message.values)


def _finish(
    message: generation_pb2.Finished | generation_pb2.GenerationResult | generation_pb2.ChatResult,
) -> Finish:
    reason = _FINISH_REASONS.get(message.finish_reason)
    if reason is None:
        raise InternalError(f"the router sent finish reason {message.finish_reason}; this client is too old to know it")
    match = message.matched_stop.WhichOneof("match")
    return Finish(
        reason=reason,
        matched_text=message.matched_stop.text if match == "text" else None,
        matched_token_id=message.matched_stop.token_id if match == "token_id" else None,
    )


def _logprobs(messages: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenText, ...]:
    return tuple(
        TokenText(
            token_id=message.token_id,
            text=message.text,
            logprob=message.logprob,
            rank=message.rank,
            top=tuple(map(_alternative, message.top)),
            token_bytes=message.token_bytes,
        )
        for message in messages
    )


def _alternative(message: common_pb2.AlternativeToken) -> TokenAlternativeText:
    return TokenAlternativeText(
        token_id=message.token_id, text=message.text, logprob=message.logprob, token_bytes=message.token_bytes
    )


_WithTotals = (
    generation_pb2.Summary
    | generation_pb2.GenerateResponse
    | generation_pb2.ChatResponse
    | embedding_pb2.EmbedResponse
    | embedding_pb2.EncodeResponse
    | scoring_pb2.ScoreResponse
    | scoring_pb2.RerankResponse
)


def summary(message: _WithTotals) -> Summary:
    usage, timing, placement = message.usage, message.timing, message.placement
    return Summary(
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            proposed_draft_tokens=usage.proposed_draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
        ),
        timing=Timing(
            queue_s=seconds_from_proto(timing.queue),
            tokenize_s=seconds_from_proto(timing.tokenize),
            prefill_s=seconds_from_proto(timing.prefill),
            kv_transfer_s=seconds_from_proto(timing.kv_transfer),
            time_to_first_token_s=seconds_from_proto(timing.time_to_first_token),
            decode_s=seconds_from_proto(timing.decode),
            total_s=seconds_from_proto(timing.total),
        ),
        placement=Placement(
            prefill_worker=placement.prefill_worker,
            decode_worker=placement.decode_worker,
            transport=placement.transport,
            kv_bytes=placement.kv_bytes,
            decode_computed_prompt_tokens=placement.decode_computed_prompt_tokens,
            retries=placement.retries,
        ),
    )
