"""What is judged of a request before it is tokenized: the ranges of all fields, and what this version cannot do."""

from __future__ import annotations

from router.admission.conversations import check_conversation
from router.admission.defaults import resolve_max_tokens
from router.limits import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    MAX_PRIORITY,
    MAX_SALT_BYTES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.errors import Unimplemented
from twinstage.types import (
    BatchPrompt,
    ChatPrompt,
    Prompt,
    RawGenerationRequest,
    RawRepetition,
    RawSampling,
    RawStopping,
    TextPrompt,
    TokenPrompt,
    ToolChoiceMode,
)


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
    }
    if isinstance(raw.prompt, ChatPrompt) and raw.prompt.tool_choice is not None:
        forced = raw.prompt.tool_choice.mode
        asked["tool_choice.mode required"] = forced is ToolChoiceMode.REQUIRED
        asked["tool_choice.function"] = forced is ToolChoiceMode.NAMED
    missing = [field for field, is_asked in asked.items() if is_asked]
    if missing:
        raise Unimplemented(f"this version does not implement {', '.join(missing)}; leave it out")


def _check_prompt(violations: Violations, prompt: Prompt | None, model: ServedModel) -> None:
    match prompt:
        case None:
            violations.add("prompt", "is required: give prompt, prompt_token_ids or batch")
        case ChatPrompt():
            check_conversation(violations, prompt)
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
    if stopping.repetition is not None:
        _check_repetition(violations, stopping.repetition)


def _check_repetition(violations: Violations, repetition: RawRepetition) -> None:
    path, shortest = "stopping.repetition_detection", repetition.min_pattern_size
    violations.check_number(f"{path}.min_pattern_size", shortest, low=1, high=MAX_PATTERN_SIZE)
    violations.check_number(f"{path}.max_pattern_size", repetition.max_pattern_size, low=1, high=MAX_PATTERN_SIZE)
    violations.check_number(f"{path}.min_count", repetition.min_count, low=2, high=MAX_PATTERN_COUNT)
    if None not in (shortest, repetition.max_pattern_size) and repetition.max_pattern_size < shortest:
        violations.add(
            f"{path}.max_pattern_size",
            f"must be at least min_pattern_size, {shortest}, is {repetition.max_pattern_size}",
        )
