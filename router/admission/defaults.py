"""What a field that is left out means: the model's own default (generation_config.json), and failing that the API's."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import TypeVar

from router.worker_entry import ServedModel
from twinstage.types import (
    BatchPrompt,
    ChatPrompt,
    Prompt,
    RawGenerationRequest,
    RawRepetition,
    RawSampling,
    RepetitionLimits,
    SamplingParameters,
    TextPrompt,
    TokenPrompt,
)

DEFAULT_MAX_TOKENS = 16  # of Generate; Chat goes on to the context limit
DEFAULT_MIN_PATTERN_SIZE, DEFAULT_MAX_PATTERN_SIZE, DEFAULT_MIN_COUNT = 1, 16, 4  # of repetition_detection
CHARACTERS_PER_TOKEN = 4  # about as many in English

Number = TypeVar("Number", int, float)


def resolve_sampling(raw: RawSampling, model: ServedModel) -> SamplingParameters:
    """Request, then the model's own default, then the API's."""
    defaults = model.tokenizer.bundle.generation_defaults

    def choose(asked: Number | None, name: str, default: Number, allowed: Callable[[Number], bool]) -> Number:
        if asked is not None:
            return asked
        value = type(default)(defaults.get(name, default))
        return value if allowed(value) else default

    # A model whose file says "do_sample: false" is meant to be greedy unless the caller says otherwise.
    temperature = 0.0 if defaults.get("do_sample") is False and raw.temperature is None else raw.temperature
    return SamplingParameters(
        temperature=choose(temperature, "temperature", 1.0, lambda value: value >= 0),
        top_p=choose(raw.top_p, "top_p", 1.0, lambda value: 0 < value <= 1),
        top_k=choose(raw.top_k, "top_k", 0, lambda value: value > 0),
        min_p=choose(raw.min_p, "min_p", 0.0, lambda value: 0 <= value <= 1),
        repetition_penalty=choose(raw.repetition_penalty, "repetition_penalty", 1.0, lambda value: 0 < value <= 2),
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        seed=raw.seed if raw.seed is not None else secrets.randbits(64),
        logit_bias=raw.logit_bias,
    )


def resolve_repetition(raw: RawRepetition | None) -> RepetitionLimits | None:
    """The API's own defaults, which no model file has."""
    if raw is None:
        return None
    shortest = raw.min_pattern_size or DEFAULT_MIN_PATTERN_SIZE
    return RepetitionLimits(
        min_pattern_size=shortest,
        max_pattern_size=raw.max_pattern_size or max(shortest, DEFAULT_MAX_PATTERN_SIZE),
        min_count=raw.min_count or DEFAULT_MIN_COUNT,
    )


def resolve_max_tokens(raw: RawGenerationRequest, model: ServedModel) -> int:
    """Request, then the model's own default, then 16 for Generate and up to the context limit for Chat."""
    if raw.stopping.max_tokens is not None:
        return raw.stopping.max_tokens
    own = int(model.tokenizer.bundle.generation_defaults.get("max_new_tokens", 0))
    if own > 0:
        return own
    # More than the context has room for, so that the worker ends with CONTEXT_LIMIT and not with LENGTH.
    return model.description.max_model_len if isinstance(raw.prompt, ChatPrompt) else DEFAULT_MAX_TOKENS


def kind_of(raw: RawGenerationRequest, model: ServedModel) -> tuple[str, int, int, int]:
    """Requests of one kind take about as long: same model, and prompts, `max_tokens` and continuations of like number.

    Numbers are alike that have the same power of two.
    """
    tokens = resolve_max_tokens(raw, model)
    return model.name, _size(raw.prompt).bit_length(), tokens.bit_length(), num_continuations(raw).bit_length()


def num_continuations(raw: RawGenerationRequest, *, most_prompts: int = sys.maxsize) -> int:
    """How many are wanted, of the first `most_prompts` prompts."""
    num_prompts = len(raw.prompt.prompts) if isinstance(raw.prompt, BatchPrompt) else 1
    return min(num_prompts, most_prompts) * (raw.sampling.n or 1)


def _size(prompt: Prompt | None) -> int:
    """Roughly its characters; tokens are known only later."""
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return CHARACTERS_PER_TOKEN * len(prompt.token_ids)
        case ChatPrompt():
            return sum(len(message.content) for message in prompt.messages)
        case BatchPrompt():
            return sum(map(_size, prompt.prompts))
    return 0
