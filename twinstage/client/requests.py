"""From the client's arguments to messages of the public API. Raises InvalidRequest for what no message can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from google.protobuf import empty_pb2

from twinstage.client.inputs import (
    ChatInput,
    GenerationInput,
    ToolChoiceInput,
    conversation_of,
    prompt_of,
    texts_of,
    tool_choice_of,
)
from twinstage.client.options import Options, Output, Sampling, Stopping
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.rpc.convert_chat import fill_conversation
from twinstage.rpc.convert_structured import structured_output_to_proto
from twinstage.rpc.convert_values import seconds_to_proto
from twinstage.types import BatchPrompt, TextPrompt, TokenPrompt, Tool, Truncation
from twinstage.v1 import admin_pb2, common_pb2, embedding_pb2, generation_pb2, tokenizer_pb2

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_REPETITION_FIELDS = ("min_pattern_size", "max_pattern_size", "min_count")


@contextmanager
def refusing() -> Iterator[None]:
    """Numbers out of a field's range, values of another type."""
    try:
        yield
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest([FieldViolation("", f"the request cannot be sent: {error}")]) from error


@refusing()
def generate_request(prompt: GenerationInput, options: Options) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(**_common(options))
    match prompt_of(prompt):
        case TextPrompt() as prompt:
            request.prompt = prompt.text
        case TokenPrompt() as prompt:
            request.prompt_token_ids.ids.extend(prompt.token_ids)
        case BatchPrompt() as prompt:
            request.batch.prompts.extend(_batch_entry(entry) for entry in prompt.prompts)
    return request


@refusing()
def chat_request(
    conversation: ChatInput, options: Options, *, tools: Sequence[Tool] = (), tool_choice: ToolChoiceInput = None
) -> generation_pb2.ChatRequest:
    """`tools` and `tool_choice` win over those of a `ChatPrompt`."""
    prompt = conversation_of(conversation)
    if tools:
        prompt = replace(prompt, tools=tuple(tools))
    if tool_choice is not None:
        prompt = replace(prompt, tool_choice=tool_choice_of(tool_choice))
    request = generation_pb2.ChatRequest(**_common(options))
    fill_conversation(request, prompt)
    return request


@refusing()
def render_request(
    conversation: ChatInput, model: str, *, tools: Sequence[Tool] = (), tool_choice: ToolChoiceInput = None
) -> tokenizer_pb2.RenderChatRequest:
    """The prompt of the chat request with the same conversation."""
    chat = chat_request(conversation, Options(model=model), tools=tools, tool_choice=tool_choice)
    # Fields that both messages have mean the same, and they have different numbers.
    shared = tokenizer_pb2.RenderChatRequest.DESCRIPTOR.fields_by_name
    given: dict[str, Any] = {field.name: value for field, value in chat.ListFields() if field.name in shared}
    return tokenizer_pb2.RenderChatRequest(**given)


@refusing()
def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> tokenizer_pb2.DetokenizeRequest:
    return tokenizer_pb2.DetokenizeRequest(token_ids=token_ids, model=model, skip_special_tokens=skip_special_tokens)


@refusing()
def watch_load_request(interval_s: float) -> admin_pb2.WatchLoadRequest:
    return admin_pb2.WatchLoadRequest(interval=seconds_to_proto(interval_s))


@refusing()
def embed_request(
    texts: str | Sequence[str],
    *,
    model: str,
    normalize: bool,
    dimensions: int | None,
    truncation: Truncation,
    prompt_name: str | None,
) -> embedding_pb2.EmbedRequest:
    return embedding_pb2.EmbedRequest(
        texts=texts_of(texts),
        model=model,
        normalize=normalize,
        dimensions=dimensions,
        truncation=truncation_to_proto(truncation),
        prompt_name=prompt_name,
        format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32,
    )


def truncation_to_proto(truncation: Truncation) -> embedding_pb2.Truncation:
    side = embedding_pb2.TRUNCATION_SIDE_UNSPECIFIED if truncation.keep_last else embedding_pb2.TRUNCATION_SIDE_RIGHT
    if truncation.to_model_limit:
        return embedding_pb2.Truncation(model_limit=empty_pb2.Empty(), side=side)
    if truncation.tokens is not None:
        return embedding_pb2.Truncation(tokens=truncation.tokens, side=side)
    return embedding_pb2.Truncation(side=side)


def _common(options: Options) -> dict[str, Any]:
    constraint = options.structured_output
    return {
        "model": options.model,
        "request_id": options.request_id,
        "sampling": _sampling(options.sampling),
        "stopping": _stopping(options.stopping),
        "output": _output(options.output),
        "structured_output": structured_output_to_proto(constraint) if constraint is not None else None,
        "priority": options.priority,
        "cache_salt": options.cache_salt,
    }


def _batch_entry(entry: TextPrompt | TokenPrompt) -> generation_pb2.PromptInput:
    if isinstance(entry, TextPrompt):
        return generation_pb2.PromptInput(prompt=entry.text)
    return generation_pb2.PromptInput(prompt_token_ids=common_pb2.TokenIds(ids=entry.token_ids))


def _sampling(sampling: Sampling) -> common_pb2.SamplingOptions:
    given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    message = common_pb2.SamplingOptions(**{name: value for name, value in given.items() if value is not None})
    message.logit_bias.update(sampling.logit_bias)
    return message


def _stopping(stopping: Stopping) -> common_pb2.StoppingOptions:
    message = common_pb2.StoppingOptions(
        stop=texts_of(stopping.stop),
        stop_token_ids=stopping.stop_token_ids,
        include_stop_str_in_output=stopping.include_stop_str_in_output,
        ignore_eos=stopping.ignore_eos,
    )
    if stopping.max_tokens is not None:
        message.max_tokens = stopping.max_tokens
    if stopping.min_tokens is not None:
        message.min_tokens = stopping.min_tokens
    if stopping.time_limit_s is not None:
        message.time_limit.CopyFrom(seconds_to_proto(stopping.time_limit_s))
    if stopping.repetition is not None:
        given = {name: getattr(stopping.repetition, name) for name in _REPETITION_FIELDS}
        present = {name: value for name, value in given.items() if value is not None}
        message.repetition_detection.CopyFrom(common_pb2.RepetitionDetection(**present))
    return message


def _output(output: Output) -> common_pb2.OutputOptions:
    message = common_pb2.OutputOptions(
        return_token_ids=output.return_token_ids, skip_special_tokens=output.skip_special_tokens
    )
    if output.logprobs is not None:
        message.logprobs = output.logprobs
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = output.prompt_logprobs
    return message
