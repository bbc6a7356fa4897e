"""Admission of inputs of pooling models: they become token ids within the model's limit, or an error that says all."""

from __future__ import annotations

from dataclasses import dataclass

from router.limits import MAX_INPUTS, MAX_NUMBERS
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import (
    POOLING_TASKS,
    PoolingParameters,
    PoolingTask,
    RawEncodeRequest,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

_VECTOR_TASKS = frozenset({PoolingTask.EMBED, PoolingTask.TOKEN_EMBED})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedInput:
    """One input. The worker scales the vector unless it has to be cut first: then the router does.

    `unpooled_tokens`: of a prompt at the beginning, that the model does not pool.
    """

    token_ids: tuple[int, ...]
    normalize: bool
    dimensions: int | None  # numbers to keep; None keeps all
    task: PoolingTask = PoolingTask.EMBED
    token_type_ids: tuple[int, ...] = ()
    unpooled_tokens: int = 0

    @property
    def worker_normalizes(self) -> bool:
        return self.normalize and self.dimensions is None

    @property
    def num_vectors(self) -> int:
        return len(self.token_ids) if self.task is PoolingTask.TOKEN_EMBED else 1


def input_limit(model: ServedModel) -> int:
    """Tokens of the longest input, special tokens included."""
    own = model.tokenizer.bundle.max_input_tokens
    limit = model.description.max_model_len
    return limit if own is None else min(own, limit)


def admit_inputs(raw: RawEncodeRequest, model: ServedModel) -> list[AdmittedInput]:
    """Check, tokenize and truncate. Runs in a thread. Raises InvalidRequest with all violations."""
    violations = Violations()
    violations.check_request_id(raw.request_id)
    if not raw.inputs:
        violations.add(raw.inputs_field, "must not be empty")
    if len(raw.inputs) > MAX_INPUTS:
        violations.add(raw.inputs_field, f"must have at most {MAX_INPUTS} entries, has {len(raw.inputs)}")
    options = _checked_options(violations, raw, model)
    violations.raise_any()
    inputs: list[AdmittedInput] = []
    wrong = 0
    for index, entry in enumerate(raw.inputs):
        chosen = options[index if len(options) > 1 else 0]
        token_ids, error_path, error = admit_input(entry, chosen.truncation, model, prompt=chosen.prompt)
        if error and wrong < MAX_LISTED_PER_FIELD:
            violations.add(_path(raw, index) + ("" if raw.inputs_field == "texts" else error_path), error)
            wrong += 1
        inputs.append(
            AdmittedInput(
                token_ids=tuple(token_ids),
                normalize=chosen.normalize,
                dimensions=chosen.dimensions,
                task=chosen.task,
                unpooled_tokens=chosen.unpooled_tokens if isinstance(entry, TextPrompt) else 0,
            )
        )
    violations.raise_any()
    _check_numbers(violations, inputs, raw, model)
    violations.raise_any()
    return inputs


def _check_numbers(
    violations: Violations, inputs: list[AdmittedInput], raw: RawEncodeRequest, model: ServedModel
) -> None:
    """An answer that no message could hold is refused before it is computed."""
    size = model.description
    sizes = {PoolingTask.TOKEN_EMBED: size.token_dimensions, PoolingTask.EMBED: size.embedding_dimensions}
    numbers = [entry.num_vectors * (entry.dimensions or sizes.get(entry.task, 1)) for entry in inputs]
    if sum(numbers) > MAX_NUMBERS:
        advice = "use EncodeStream" if max(numbers) <= MAX_NUMBERS else "give fewer tokens or dimensions"
        words = f"gives {sum(numbers)} numbers, where a message has {MAX_NUMBERS} at most; {advice}"
        violations.add(raw.inputs_field, words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How an input is encoded; `dimensions` is None for all."""

    task: PoolingTask
    truncation: Truncation
    normalize: bool
    dimensions: int | None
    prompt: str
    unpooled_tokens: int


def _checked_options(violations: Violations, raw: RawEncodeRequest, model: ServedModel) -> list[_Options]:
    """One for all inputs, or one per input."""
    num_parameters, num_inputs = len(raw.parameters), len(raw.inputs)
    if num_parameters > 1 and num_parameters != num_inputs:
        violations.add(
            "parameters",
            f"has {num_parameters} entries, inputs has {num_inputs}: give one for all inputs, or one per input",
        )
        return []
    known: dict[PoolingParameters, _Options] = {}  # most inputs have the same
    for index, parameters in enumerate(raw.all_parameters):
        if parameters not in known:
            prefix = f"parameters[{index}]." if raw.parameters else ""
            known[parameters] = _options(violations, prefix, parameters, model)
    return [known[parameters] for parameters in raw.all_parameters]


def _options(violations: Violations, prefix: str, parameters: PoolingParameters, model: ServedModel) -> _Options:
    task = parameters.task or POOLING_TASKS[model.description.task][0]
    of_tokens = task is PoolingTask.TOKEN_EMBED
    size = model.description.token_dimensions if of_tokens else model.description.embedding_dimensions
    truncation = parameters.truncation or Truncation()
    if task in _VECTOR_TASKS:
        violations.check_number(f"{prefix}dimensions", parameters.dimensions, low=1, high=size)
    elif parameters.dimensions is not None:
        violations.add(f"{prefix}dimensions", f"is for vectors, and the task {task.value} gives none; leave it out")
    violations.check_number(f"{prefix}truncation.tokens", truncation.tokens, low=1, high=input_limit(model))
    prompts = model.tokenizer.bundle.prompts
    if parameters.prompt_name and parameters.prompt_name not in prompts:
        names = f"has {', '.join(sorted(prompts))}" if prompts else "has none"
        violations.add(f"{prefix}prompt_name", f"the model has no such prompt; it {names}")
    prompt = prompt_text(model, parameters.prompt_name)
    return _Options(
        task=task,
        truncation=truncation,
        normalize=parameters.normalize is not False and task in _VECTOR_TASKS,
        dimensions=None if parameters.dimensions == size else parameters.dimensions,
        prompt=prompt,
        unpooled_tokens=unpooled_tokens(model, prompt),
    )


def prompt_text(model: ServedModel, name: str | None) -> str:
    """The prompt of this name; of None the model's default, of "" none."""
    bundle = model.tokenizer.bundle
    chosen = bundle.default_prompt_name if name is None else name
    return bundle.prompts.get(chosen, "") if chosen else ""


def unpooled_tokens(model: ServedModel, prompt: str) -> int:
    """Tokens of the prompt that are left out of the pooling: those before the text, and no special one after it."""
    if not prompt or model.tokenizer.bundle.pools_prompt:
        return 0
    return model.tokenizer.prompt_tokens(prompt)


def _path(raw: RawEncodeRequest, index: int) -> str:
    """The path of an input; a stream's request has one, without an index."""
    return raw.inputs_field if raw.inputs_field == "input" else f"{raw.inputs_field}[{index}]"


def admit_input(
    entry: TextPrompt | TokenPrompt | None, truncation: Truncation, model: ServedModel, *, prompt: str = ""
) -> tuple[list[int], str, str]:
    """Token ids, or the path within the input and the words of what is wrong. `prompt` is put before a text."""
    if entry is None:
        return [], "", "is required: give text or token_ids"
    limit = input_limit(model)
    cut_to = limit if truncation.to_model_limit else truncation.tokens
    if isinstance(entry, TextPrompt):
        if cut_to is not None:
            entry = shortened(entry, cut_to, keep_last=truncation.keep_last, tokenizer=model.tokenizer)
        elif error := too_many_characters(entry.text, model):
            return [], ".text", error
        if entry.text:
            entry = TextPrompt(text=prompt + entry.text)
    if isinstance(entry, TokenPrompt):
        path, error = ".token_ids.ids", _wrong_ids(entry, model)
        token_ids = list(entry.token_ids)
    else:
        path, error = ".text", "" if entry.text else "must not be empty"
        token_ids = model.tokenizer.encode(entry.text) if entry.text else []
    if error:
        return [], path, error
    if cut_to is not None and len(token_ids) > cut_to:
        kept = model.tokenizer.prompt_tokens(prompt) if truncation.keep_last and isinstance(entry, TextPrompt) else 0
        token_ids = _cut(entry, token_ids, cut_to, kept, truncation=truncation, tokenizer=model.tokenizer)
    if len(token_ids) > limit:
        return [], path, f"has {len(token_ids)} tokens, the model's limit is {limit}; shorten it or set truncation"
    return (token_ids, path, "") if token_ids else ([], path, "gives no tokens")


def too_many_characters(text: str, model: ServedModel) -> str:
    """What is wrong with a text that cannot fit, whatever its tokens are: it need not be tokenized. Empty: nothing."""
    limit = input_limit(model)
    if len(text) <= limit * model.tokenizer.longest_token_characters:
        return ""
    size = f"has {len(text)} characters, more than the model's limit of {limit} tokens can hold"
    return f"{size}; shorten it or set truncation"


def _wrong_ids(entry: TokenPrompt, model: ServedModel) -> str:
    vocab_size = model.description.vocab_size
    if not entry.token_ids:
        return "must not be empty"
    if max(entry.token_ids) >= vocab_size:
        return f"each id must be below the vocabulary's size {vocab_size}, one is {max(entry.token_ids)}"
    return ""


def shortened(entry: TextPrompt, max_tokens: int, *, keep_last: bool, tokenizer: TextTokenizer) -> TextPrompt:
    """So much of the text as gives more than `max_tokens` tokens: to tokenize the rest takes long, for nothing.

    One token more than is kept, as the one at which the text is cut may be another than in the whole text.
    """
    num_characters = (max_tokens + 1) * tokenizer.longest_token_characters
    if len(entry.text) <= num_characters:
        return entry
    return TextPrompt(text=entry.text[-num_characters:] if keep_last else entry.text[:num_characters])


def _cut(
    entry: TextPrompt | TokenPrompt,
    token_ids: list[int],
    limit: int,
    prompt_tokens: int,
    *,
    truncation: Truncation,
    tokenizer: TextTokenizer,
) -> list[int]:
    """At most `limit` tokens. Text keeps its special tokens where there is room for them; ids are cut as they are.

    The first `prompt_tokens` stay where the beginning is cut, if anything of the text does.
    """
    if 0 < prompt_tokens < limit - tokenizer.num_special_tokens:
        return [*token_ids[:prompt_tokens], *token_ids[prompt_tokens - limit :]]
    if isinstance(entry, TextPrompt):
        token_ids = tokenizer.encode_truncated(entry.text, max_tokens=limit, keep_last=truncation.keep_last)
    return token_ids[-limit:] if truncation.keep_last else token_ids[:limit]
