"""What is judged of a request before it is tokenized: the ranges of all fields, and what this version cannot do."""

from __future__ import annotations

from router.admission.answers import ParserChoice, tool_problem
from router.admission.capabilities import check_capabilities
from router.admission.conversations import check_conversation
from router.admission.defaults import resolve_max_tokens
from router.admission.forced_calls import must_call
from router.limits import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_CONTINUATIONS,
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
from twinstage.grammar.shape import shape_violations
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
)


def check_fields(raw: RawGenerationRequest, model: ServedModel, parsers: ParserChoice | None = None) -> None:
    """Judge every field that can be judged without tokenizing. `parsers` are to read the answer.

    Raises InvalidRequest with all violations, else Unimplemented for what this version cannot do.
    """
    violations = Violations()
    violations.check_request_id(raw.request_id)
    violations.check_number("priority", raw.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    if len(raw.cache_salt.encode()) > MAX_SALT_BYTES:
        violations.add("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
    _check_prompt(violations, raw.prompt, model)
    if isinstance(raw.prompt, ChatPrompt) and (problem := tool_problem(raw.prompt, model, parsers or ParserChoice())):
        violations.add("tools", problem)
    _check_choices(violations, raw, model)
    _check_sampling(violations, raw.sampling, model)
    _check_stopping(violations, raw.stopping, model, max_tokens=resolve_max_tokens(raw, model))
    violations.check_number("output.logprobs", raw.output.logprobs, low=0, high=MAX_LOGPROBS)
    violations.check_number("output.prompt_logprobs", raw.output.prompt_logprobs, low=0, high=MAX_LOGPROBS)
    if raw.structured_output is not None:
        violations.extend(shape_violations(raw.structured_output))
        if must_call(raw.prompt):
            violations.add("structured_output", "excludes a tool_choice that forces calls; set only one of them")
    violations.raise_any()
    check_capabilities(raw, model)


def _check_prompt(violations: Violations, prompt: Prompt | None, model: ServedModel) -> None:
    match prompt:
        case None:
            violations.add("prompt", "is required: give prompt, prompt_token_ids or batch")
        case ChatPrompt():
            check_conversation(violations, prompt)
        case BatchPrompt(prompts=()):
            violations.add("batch.prompts", "must not be empty")
        case BatchPrompt():
            _check_batch(violations, prompt, model)
        case _:
            check_input(violations, "", prompt, model)


def _check_batch(violations: Violations, batch: BatchPrompt, model: ServedModel) -> None:
    """Every prompt is looked at, and the first wrong ones are named."""
    num_wrong = 0
    for index, entry in enumerate(batch.prompts):
        before = len(violations)
        check_input(violations, f"batch.prompts[{index}].", entry, model)
        num_wrong += len(violations) > before
        if num_wrong == MAX_LISTED_PER_FIELD:
            return


def check_input(violations: Violations, path: str, prompt: TextPrompt | TokenPrompt, model: ServedModel) -> None:
    """A text that is not empty, or token ids of which each is in the vocabulary."""
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            violations.add(f"{path}prompt", "must not be empty")
    elif not prompt.token_ids:
        violations.add(f"{path}prompt_token_ids.ids", "must not be empty")
    else:
        violations.check_token_ids(f"{path}prompt_token_ids.ids", prompt.token_ids, model.description.vocab_size)


def _check_choices(violations: Violations, raw: RawGenerationRequest, model: ServedModel) -> None:
    """What a call asks for can be held: by one decode worker for each prompt, and by the router for all."""
    num_choices = raw.sampling.n or 1
    if isinstance(raw.prompt, BatchPrompt) and num_choices * len(raw.prompt.prompts) > MAX_CONTINUATIONS:
        asked = f"{len(raw.prompt.prompts)} prompts with {num_choices} choices each"
        violations.add("batch.prompts", f"must be at most {MAX_CONTINUATIONS} continuations together, are {asked}")
    if not 1 < num_choices <= MAX_CHOICES or resolve_max_tokens(raw, model) <= 1 or not model.decode:
        return  # one token needs no decode worker
    held = max(life.description.max_num_sequences for life in model.decode)
    if num_choices > held:
        violations.add("sampling.n", f"must be at most {held}, what a decode worker computes at once, is {num_choices}")


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
    path, shortest, longest = "stopping.repetition_detection", repetition.min_pattern_size, repetition.max_pattern_size
    violations.check_number(f"{path}.min_pattern_size", shortest, low=1, high=MAX_PATTERN_SIZE)
    violations.check_number(f"{path}.max_pattern_size", longest, low=1, high=MAX_PATTERN_SIZE)
    violations.check_number(f"{path}.min_count", repetition.min_count, low=2, high=MAX_PATTERN_COUNT)
    if shortest is not None and longest is not None and longest < shortest:
        violations.add(
            f"{path}.max_pattern_size",
            f"must be at least min_pattern_size, {shortest}, is {longest}",
        )
