"""Admission of inputs of pooling models: they become token ids within the model's limit, or an error that says all."""

from __future__ import annotations

from dataclasses import dataclass

from router.input_tokens import RawInput, input_limit, tokenize_inputs
from router.limits import MAX_INPUTS, MAX_NUMBERS
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.types import (
    POOLING_TASKS,
    PoolingParameters,
    PoolingTask,
    RawEncodeRequest,
    TextPrompt,
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
    if len(options) == 1:
        options = options * len(raw.inputs)
    given = [
        RawInput(entry=entry, truncation=chosen.truncation, prompt=chosen.prompt)
        for entry, chosen in zip(raw.inputs, options, strict=True)
    ]
    inputs: list[AdmittedInput] = []
    wrong = 0
    for index, (chosen, tokenized) in enumerate(zip(options, tokenize_inputs(given, model), strict=True)):
        if tokenized.error and wrong < MAX_LISTED_PER_FIELD:
            path = _path(raw, index) + ("" if raw.inputs_field == "texts" else tokenized.path)
            violations.add(path, tokenized.error)
            wrong += 1
        inputs.append(
            AdmittedInput(
                token_ids=tuple(tokenized.token_ids),
                normalize=chosen.normalize,
                dimensions=chosen.dimensions,
                task=chosen.task,
                unpooled_tokens=chosen.unpooled_tokens if isinstance(raw.inputs[index], TextPrompt) else 0,
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
