"""Admission: what a client sent becomes a request that workers can be trusted with, or an error that says all.

    check the fields  ->  tokenize or render (in a thread)  ->  check the lengths  ->  resolve every default

A field that is left out takes the model's own default (generation_config.json) and failing that the API's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from router.limits import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SALT_BYTES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest, Unimplemented
from twinstage.text.chat_template import render_chat
from twinstage.text.template_process import TemplateProcesses
from twinstage.types import (
    AdmittedRequest,
    BatchPrompt,
    ChatPrompt,
    Prompt,
    RawGenerationRequest,
    RawSampling,
    RawStopping,
    RequestId,
    SamplingParameters,
    SequenceSpec,
    TextOptions,
    TextPrompt,
    TokenPrompt,
)

DEFAULT_MAX_TOKENS = 16  # of Generate; Chat goes on to the context limit
CHARACTERS_PER_TOKEN = 4  # about as many in English

Number = TypeVar("Number", int, float)


def check_fields(raw: RawGenerationRequest, model: ServedModel) -> None:
    """Judge every field that can be judged without tokenizing.

    Raises InvalidRequest with all violations, else Unimplemented for what this version cannot do.
    """
    violations = Violations()
    violations.check_request_id(raw.request_id)
    violations.check_number("priority", raw.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    if len(raw.cache_salt.encode()) > MAX_SALT_BYTES:
        violations.add("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
    _check_prompt(violations, raw.prompt, model)
    _check_sampling(violations, raw.sampling, model)
    _check_stopping(violations, raw.stopping, model, max_tokens=resolve_max_tokens(raw, model))
    violations.check_number("output.logprobs", raw.output.logprobs, low=0, high=MAX_LOGPROBS)
    violations.check_number("output.prompt_logprobs", raw.output.prompt_logprobs, low=0, high=MAX_LOGPROBS)
    violations.raise_any()
    _refuse_unimplemented(raw)


def _refuse_unimplemented(raw: RawGenerationRequest) -> None:
    asked = {
        "sampling.n above 1": (raw.sampling.n or 1) > 1,
        "batch": isinstance(raw.prompt, BatchPrompt),
        "structured_output": raw.has_structured_output,
        "output.prompt_logprobs": raw.output.prompt_logprobs is not None,
        "stopping.repetition_detection": raw.stopping.has_repetition_detection,
    }
    missing = [field for field, is_asked in asked.items() if is_asked]
    if missing:
        raise Unimplemented(f"this version does not implement {', '.join(missing)}; leave it out")


def _check_prompt(violations: Violations, prompt: Prompt | None, model: ServedModel) -> None:
    match prompt:
        case None:
            violations.add("prompt", "is required: give prompt, prompt_token_ids or batch")
        case ChatPrompt():
            _check_messages(violations, prompt)
        case BatchPrompt(prompts=()):
            violations.add("batch.prompts", "must not be empty")
        case BatchPrompt():
            for index, entry in enumerate(prompt.prompts[:MAX_LISTED_PER_FIELD]):
                check_input(violations, f"batch.prompts[{index}].", entry, model)
        case _:
            check_input(violations, "", prompt, model)


def check_input(violations: Violations, path: str, prompt: TextPrompt | TokenPrompt, model: ServedModel) -> None:
    """A text that is not empty, or token ids of which each is in the vocabulary."""
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            violations.add(f"{path}prompt", "must not be empty")
    elif not prompt.token_ids:
        violations.add(f"{path}prompt_token_ids.ids", "must not be empty")
    else:
        violations.check_token_ids(f"{path}prompt_token_ids.ids", prompt.token_ids, model.description.vocab_size)


def _check_messages(violations: Violations, prompt: ChatPrompt) -> None:
    if not prompt.messages:
        violations.add("messages", "must not be empty")
    nameless = [index for index, message in enumerate(prompt.messages) if not message.role]
    for index in nameless[:MAX_LISTED_PER_FIELD]:
        violations.add(f"messages[{index}].role", "must not be empty")


def _check_sampling(violations: Violations, sampling: RawSampling, model: ServedModel) -> None:
    check = violations.check_number
    check("sampling.n", sampling.n, low=1, high=MAX_CHOICES)
    check("sampling.temperature", sampling.temperature, low=0)
    check("sampling.top_p", sampling.top_p, low=0, high=1, low_is_open=True)
    check("sampling.top_k", sampling.top_k, low=1)
    check("sampling.min_p", sampling.min_p, low=0, high=1)
    check("sampling.repetition_penalty", sampling.repetition_penalty, low=0, high=2, low_is_open=True)
    check("sampling.presence_penalty", sampling.presence_penalty, low=-2, high=2)
    check("sampling.frequency_penalty", sampling.frequency_penalty, low=-2, high=2)
    vocab_size = model.description.vocab_size
    unknown = [token_id for token_id in sampling.logit_bias if token_id >= vocab_size]
    for token_id in unknown[:MAX_LISTED_PER_FIELD]:
        violations.add(f"sampling.logit_bias[{token_id}]", f"the token id must be below {vocab_size}")
    for token_id, bias in sampling.logit_bias.items():
        check(f"sampling.logit_bias[{token_id}]", bias, low=-MAX_BIAS, high=MAX_BIAS)


def _check_stopping(violations: Violations, stopping: RawStopping, model: ServedModel, *, max_tokens: int) -> None:
    violations.check_number("stopping.max_tokens", stopping.max_tokens, low=1)
    if max_tokens >= 1 and (stopping.min_tokens or 0) > max_tokens:
        violations.add("stopping.min_tokens", f"must be at most max_tokens, {max_tokens}, is {stopping.min_tokens}")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        violations.add("stopping.stop", f"must have at most {MAX_STOP_STRINGS} entries, has {len(stopping.stop)}")
    for index, text in enumerate(stopping.stop[:MAX_STOP_STRINGS]):
        if not text:
            violations.add(f"stopping.stop[{index}]", "must not be empty")
        if len(text) > MAX_STOP_CHARACTERS:
            violations.add(
                f"stopping.stop[{index}]", f"must have at most {MAX_STOP_CHARACTERS} characters, has {len(text)}"
            )
    violations.check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, model.description.vocab_size)
    violations.check_number("stopping.time_limit", stopping.time_limit_s, low=0, low_is_open=True)


# --- tokenizing and lengths -----------------------------------------------------------------------


def tokenize(prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
    """The prompt's token ids. Runs in a thread: long prompts and templates take their time."""
    match prompt:
        case TextPrompt():
            _check_characters(prompt, prompt.text, model)
            return tuple(model.tokenizer.encode(prompt.text))
        case TokenPrompt():
            return prompt.token_ids
        case ChatPrompt():
            return _tokenize_rendered(prompt, render_chat(model.tokenizer.bundle, prompt), model)
        case BatchPrompt():
            raise Unimplemented("this version does not implement batch")


def _tokenize_rendered(prompt: ChatPrompt, text: str, model: ServedModel) -> tuple[int, ...]:
    _check_characters(prompt, text, model)
    # The template has written the special tokens already.
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def _check_characters(prompt: Prompt, text: str, model: ServedModel) -> None:
    """Refuse what would take long to tokenize only to be too long. Raises InvalidRequest."""
    limit = model.description.max_model_len
    if len(text) > limit * model.tokenizer.longest_token_characters:
        description = f"prompt 0 has {len(text)} characters, more than the model's limit of {limit} tokens can hold"
        raise InvalidRequest([FieldViolation(field_of(prompt), description)])


def field_of(prompt: Prompt) -> str:
    """The path by which a client knows its prompt."""
    match prompt:
        case TextPrompt():
            return "prompt"
        case TokenPrompt():
            return "prompt_token_ids.ids"
        case ChatPrompt():
            return "messages"
        case BatchPrompt():
            return "batch.prompts"


def check_length(field: str, length: int, *, stopping: RawStopping, limit: int) -> None:
    """The prompt and what the request insists on generating fit the model's context. Raises InvalidRequest."""
    if length == 0:
        raise InvalidRequest([FieldViolation(field, "gives no tokens")])
    needed = max(1, stopping.min_tokens or 0)
    if stopping.max_tokens is not None:
        needed = max(needed, stopping.max_tokens)
    if length + needed <= limit:
        return
    asked = f"{needed} generated tokens" if needed > 1 else "the one token to generate"
    raise InvalidRequest(
        [FieldViolation(field, f"prompt 0 has {length} tokens, which with {asked} exceed the model's limit of {limit}")]
    )


# --- defaults -------------------------------------------------------------------------------------


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


def resolve_max_tokens(raw: RawGenerationRequest, model: ServedModel) -> int:
    """Request, then the model's own default, then 16 for Generate and up to the context limit for Chat."""
    if raw.stopping.max_tokens is not None:
        return raw.stopping.max_tokens
    own = int(model.tokenizer.bundle.generation_defaults.get("max_new_tokens", 0))
    if own > 0:
        return own
    # More than the context has room for, so that the worker ends with CONTEXT_LIMIT and not with LENGTH.
    return model.description.max_model_len if isinstance(raw.prompt, ChatPrompt) else DEFAULT_MAX_TOKENS


def kind_of(raw: RawGenerationRequest, model: ServedModel) -> tuple[str, int, int]:
    """Requests of one kind take about as long: same model, and prompt and `max_tokens` of like size (powers of two)."""
    return model.name, _size(raw.prompt).bit_length(), resolve_max_tokens(raw, model).bit_length()


def _size(prompt: Prompt | None) -> int:
    """Roughly its characters; tokens are known only later."""
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return CHARACTERS_PER_TOKEN * len(prompt.token_ids)
        case ChatPrompt():
            return sum(len(message.content) for message in prompt.messages)
    return 0


class Admission:
    """Admits requests; tokenizes in `executor`, off the event loop, and renders requests' own templates elsewhere."""

    def __init__(self, executor: Executor, templates: TemplateProcesses | None = None) -> None:
        self._executor = executor
        self._templates = templates or TemplateProcesses()

    async def admit(
        self, raw: RawGenerationRequest, model: ServedModel, *, request_id: str, arrived_s: float, deadline_s: float
    ) -> AdmittedRequest:
        """Tokenize, check the length, resolve every default. The fields were checked by `check_fields`.

        Times are readings of the loop's clock. Raises InvalidRequest.
        """
        assert raw.prompt is not None
        started_s = time.monotonic()
        token_ids = await self._token_ids(raw.prompt, model)
        tokenize_s = time.monotonic() - started_s
        limit = model.description.max_model_len
        check_length(field_of(raw.prompt), len(token_ids), stopping=raw.stopping, limit=limit)
        return AdmittedRequest(
            spec=_resolve_spec(raw, model, request_id=RequestId(request_id), token_ids=token_ids),
            model=model.name,
            text=TextOptions(
                stop=raw.stopping.stop,
                include_stop_str_in_output=raw.stopping.include_stop_str_in_output,
                skip_special_tokens=raw.output.skip_special_tokens,
                return_token_ids=raw.output.return_token_ids,
            ),
            arrived_s=arrived_s,
            deadline_s=deadline_s,
            tokenize_s=tokenize_s,
            time_limit_s=raw.stopping.time_limit_s,
        )

    async def _token_ids(self, prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):  # nothing to do, so nothing to wait for
            return prompt.token_ids
        loop = asyncio.get_running_loop()
        if isinstance(prompt, ChatPrompt) and prompt.chat_template:
            text = await self._templates.render(model.tokenizer.bundle, prompt)
            return await loop.run_in_executor(self._executor, _tokenize_rendered, prompt, text, model)
        return await loop.run_in_executor(self._executor, tokenize, prompt, model)


def _resolve_spec(
    raw: RawGenerationRequest, model: ServedModel, *, request_id: RequestId, token_ids: tuple[int, ...]
) -> SequenceSpec:
    end_of_sequence = () if raw.stopping.ignore_eos else model.description.eos_token_ids
    return SequenceSpec(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=resolve_sampling(raw.sampling, model),
        max_tokens=resolve_max_tokens(raw, model),
        min_tokens=raw.stopping.min_tokens or 0,
        stop_token_ids=frozenset(end_of_sequence) | frozenset(raw.stopping.stop_token_ids),
        logprobs=raw.output.logprobs,
        priority=raw.priority,
        cache_salt=raw.cache_salt,
    )
