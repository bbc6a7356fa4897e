"""Conversion between domain types and the generation messages of `twinstage.v1`, on the router's side.

What a client sends is not trusted: conversion keeps it as it is, for admission to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from twinstage.rpc.convert_chat import chat_prompt_from_proto, message_to_proto, tool_call_deltas_to_proto
from twinstage.rpc.convert_structured import structured_output_from_proto
from twinstage.rpc.convert_values import (
    float_as_written,
    optional_float_from_proto,
    optional_from_proto,
    seconds_from_proto,
    seconds_to_proto,
)
from twinstage.text.answers.parts import AnswerDelta
from twinstage.types import (
    BatchPrompt,
    ChatMessage,
    Finish,
    FinishReason,
    Placement,
    ProducedToken,
    RawGenerationRequest,
    RawOutput,
    RawRepetition,
    RawSampling,
    RawStopping,
    TextPrompt,
    Timing,
    TokenLogprobs,
    TokenPrompt,
    Usage,
)
from twinstage.types.constraints import RawStructuredOutput
from twinstage.v1 import common_pb2, generation_pb2

Speller = Callable[[int], tuple[str, bytes]]  # the text and the bytes of a token id

_FINISH_REASON_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LIMIT: common_pb2.FINISH_REASON_CONTEXT_LIMIT,
    FinishReason.TIME_LIMIT: common_pb2.FINISH_REASON_TIME_LIMIT,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
    FinishReason.REPETITION: common_pb2.FINISH_REASON_REPETITION,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


# --- requests -------------------------------------------------------------------------------------


def generate_request_from_proto(request: generation_pb2.GenerateRequest) -> RawGenerationRequest:
    return RawGenerationRequest(
        prompt=_prompt_from_proto(request),
        model=request.model,
        request_id=request.request_id,
        sampling=sampling_from_proto(request.sampling),
        stopping=stopping_from_proto(request.stopping),
        output=output_from_proto(request.output),
        structured_output=_structured_output(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def chat_request_from_proto(request: generation_pb2.ChatRequest) -> RawGenerationRequest:
    return RawGenerationRequest(
        prompt=chat_prompt_from_proto(request),
        model=request.model,
        request_id=request.request_id,
        sampling=sampling_from_proto(request.sampling),
        stopping=stopping_from_proto(request.stopping),
        output=output_from_proto(request.output),
        structured_output=_structured_output(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _structured_output(
    request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest,
) -> RawStructuredOutput | None:
    if not request.HasField("structured_output"):
        return None
    return structured_output_from_proto(request.structured_output)


def sampling_from_proto(sampling: common_pb2.SamplingOptions) -> RawSampling:
    return RawSampling(
        n=optional_from_proto(sampling, "n"),
        temperature=optional_float_from_proto(sampling, "temperature"),
        top_p=optional_float_from_proto(sampling, "top_p"),
        top_k=optional_from_proto(sampling, "top_k"),
        min_p=optional_float_from_proto(sampling, "min_p"),
        repetition_penalty=optional_float_from_proto(sampling, "repetition_penalty"),
        presence_penalty=optional_float_from_proto(sampling, "presence_penalty"),
        frequency_penalty=optional_float_from_proto(sampling, "frequency_penalty"),
        seed=optional_from_proto(sampling, "seed"),
        logit_bias={token_id: float_as_written(bias) for token_id, bias in sampling.logit_bias.items()},
    )


def stopping_from_proto(stopping: common_pb2.StoppingOptions) -> RawStopping:
    has_time_limit = stopping.HasField("time_limit")
    return RawStopping(
        max_tokens=optional_from_proto(stopping, "max_tokens"),
        min_tokens=optional_from_proto(stopping, "min_tokens"),
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        include_stop_str_in_output=stopping.include_stop_str_in_output,
        ignore_eos=stopping.ignore_eos,
        time_limit_s=seconds_from_proto(stopping.time_limit) if has_time_limit else None,
        repetition=_repetition_from_proto(stopping) if stopping.HasField("repetition_detection") else None,
    )


def _repetition_from_proto(stopping: common_pb2.StoppingOptions) -> RawRepetition:
    repetition = stopping.repetition_detection
    return RawRepetition(
        min_pattern_size=optional_from_proto(repetition, "min_pattern_size"),
        max_pattern_size=optional_from_proto(repetition, "max_pattern_size"),
        min_count=optional_from_proto(repetition, "min_count"),
    )


def output_from_proto(output: common_pb2.OutputOptions) -> RawOutput:
    return RawOutput(
        logprobs=optional_from_proto(output, "logprobs"),
        prompt_logprobs=optional_from_proto(output, "prompt_logprobs"),
        return_token_ids=output.return_token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
    )


def _prompt_from_proto(request: generation_pb2.GenerateRequest) -> TextPrompt | TokenPrompt | BatchPrompt | None:
    match request.WhichOneof("input"):
        case "prompt":
            return TextPrompt(text=request.prompt)
        case "prompt_token_ids":
            return TokenPrompt(token_ids=tuple(request.prompt_token_ids.ids))
        case "batch":
            return BatchPrompt(prompts=tuple(_batch_entry_from_proto(entry) for entry in request.batch.prompts))
    return None


def _batch_entry_from_proto(entry: generation_pb2.PromptInput) -> TextPrompt | TokenPrompt:
    if entry.WhichOneof("input") == "prompt_token_ids":
        return TokenPrompt(token_ids=tuple(entry.prompt_token_ids.ids))
    return TextPrompt(text=entry.prompt)  # an entry left out reads as an empty text, which admission refuses


# --- results --------------------------------------------------------------------------------------


def prompt_info_to_proto(*, request_id: str, model: str, prompt_tokens: int) -> generation_pb2.PromptInfo:
    return generation_pb2.PromptInfo(request_id=request_id, model=model, prompt_tokens=prompt_tokens)


def delta_to_proto(
    delta: AnswerDelta, tokens: Sequence[ProducedToken], *, index: int, return_token_ids: bool, spell: Speller
) -> generation_pb2.Delta:
    """`spell` is asked only for tokens that carry log probabilities."""
    return generation_pb2.Delta(
        index=index,
        text=delta.content,
        token_ids=[token.token_id for token in tokens] if return_token_ids else [],
        logprobs=token_logprobs_to_proto(tokens, spell),
        reasoning=delta.reasoning,
        tool_calls=tool_call_deltas_to_proto(delta.tool_calls),
    )


def finished_to_proto(finish: Finish, *, index: int) -> generation_pb2.Finished:
    return generation_pb2.Finished(
        index=index, finish_reason=_FINISH_REASON_TO_PROTO[finish.reason], matched_stop=matched_stop_to_proto(finish)
    )


def summary_to_proto(*, usage: Usage, timing: Timing, placement: Placement) -> generation_pb2.Summary:
    return generation_pb2.Summary(
        usage=usage_to_proto(usage), timing=timing_to_proto(timing), placement=placement_to_proto(placement)
    )


def generation_result_to_proto(
    text: str,
    tokens: Sequence[ProducedToken],
    *,
    index: int,
    finish: Finish,
    return_token_ids: bool,
    spell: Speller,
) -> generation_pb2.GenerationResult:
    return generation_pb2.GenerationResult(
        index=index,
        text=text,
        token_ids=[token.token_id for token in tokens] if return_token_ids else [],
        logprobs=token_logprobs_to_proto(tokens, spell),
        finish_reason=_FINISH_REASON_TO_PROTO[finish.reason],
        matched_stop=matched_stop_to_proto(finish),
    )


def chat_result_to_proto(
    message: ChatMessage,
    tokens: Sequence[ProducedToken],
    *,
    index: int,
    finish: Finish,
    return_token_ids: bool,
    spell: Speller,
) -> generation_pb2.ChatResult:
    return generation_pb2.ChatResult(
        index=index,
        message=message_to_proto(message),
        token_ids=[token.token_id for token in tokens] if return_token_ids else [],
        logprobs=token_logprobs_to_proto(tokens, spell),
        finish_reason=_FINISH_REASON_TO_PROTO[finish.reason],
        matched_stop=matched_stop_to_proto(finish),
    )


def prompt_logprobs_to_proto(
    tokens: Iterable[ProducedToken], *, start: int, spell: Speller, prompt_index: int = 0
) -> generation_pb2.PromptLogprobs:
    """Consecutive tokens of a prompt, the first at position `start`."""
    scores = token_logprobs_to_proto(tokens, spell)
    return generation_pb2.PromptLogprobs(prompt_index=prompt_index, start=start, tokens=scores)


def token_logprobs_to_proto(tokens: Iterable[ProducedToken], spell: Speller) -> list[common_pb2.TokenLogprob]:
    """One entry per token that carries log probabilities."""
    return [
        _token_logprob_to_proto(token.token_id, token.logprobs, spell) for token in tokens if token.logprobs is not None
    ]


def _token_logprob_to_proto(token_id: int, logprobs: TokenLogprobs, spell: Speller) -> common_pb2.TokenLogprob:
    text, token_bytes = spell(token_id)
    message = common_pb2.TokenLogprob(
        token_id=token_id, text=text, token_bytes=token_bytes, logprob=logprobs.logprob, rank=logprobs.rank
    )
    for entry in logprobs.top:
        text, token_bytes = spell(entry.token_id)
        message.top.add(token_id=entry.token_id, text=text, token_bytes=token_bytes, logprob=entry.logprob)
    return message


def matched_stop_to_proto(finish: Finish) -> common_pb2.MatchedStop | None:
    if finish.matched_text is not None:
        return common_pb2.MatchedStop(text=finish.matched_text)
    if finish.matched_token_id is not None:
        return common_pb2.MatchedStop(token_id=finish.matched_token_id)
    return None


def usage_to_proto(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        proposed_draft_tokens=usage.proposed_draft_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
    )


def timing_to_proto(timing: Timing) -> common_pb2.Timing:
    return common_pb2.Timing(
        queue=seconds_to_proto(timing.queue_s),
        tokenize=seconds_to_proto(timing.tokenize_s),
        prefill=seconds_to_proto(timing.prefill_s),
        kv_transfer=seconds_to_proto(timing.kv_transfer_s),
        time_to_first_token=seconds_to_proto(timing.time_to_first_token_s),
        decode=seconds_to_proto(timing.decode_s),
        total=seconds_to_proto(timing.total_s),
    )


def placement_to_proto(placement: Placement) -> common_pb2.Placement:
    return common_pb2.Placement(
        prefill_worker=placement.prefill_worker,
        decode_worker=placement.decode_worker,
        transport=placement.transport,
        kv_bytes=placement.kv_bytes,
        decode_computed_prompt_tokens=placement.decode_computed_prompt_tokens,
        retries=placement.retries,
    )
