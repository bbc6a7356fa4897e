"""What `--model [NAME=]REF` means, decided without loading a model or importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstage.errors import ConfigError
from twinstage.models.config_files import detect_task
from twinstage.types import Task

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)")
_DEMO_TASKS = {"demo": Task.GENERATE, "demo-embedding": Task.EMBED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """A model to serve. `name` is empty where the worker names it after the reference."""

    reference: str
    name: str
    task: Task
    worker_flags: tuple[str, ...] = ()  # what its workers are told of it alone

    @property
    def label(self) -> str:
        """Short and fit for the names of processes."""
        return _label(self.name, self.reference)


def choose_models(arguments: Sequence[str], told: Mapping[str, Sequence[str]]) -> tuple[ModelChoice, ...]:
    """Read the `--model` arguments, and what is told of single models: flag -> `[NAME=]VALUE`.

    Without a name, a value is that of the only model. Raises ConfigError or ModelError.
    """
    halves = [_split(argument) for argument in arguments]
    labels = [_label(name, reference) for name, reference in halves]
    if len(set(labels)) != len(labels):
        raise ConfigError("--model: two models have the same name; tell them apart with NAME=REF")
    values = {flag: _by_label(flag, given, labels) for flag, given in told.items()}
    choices = []
    for (name, reference), label in zip(halves, labels, strict=True):
        own = {flag: of_label[label] for flag, of_label in values.items() if label in of_label}
        choices.append(_choose(name, reference, own))
    return tuple(choices)


def choose_model(argument: str) -> ModelChoice:
    """Read one `--model` argument. Raises ConfigError or ModelError."""
    return choose_models((argument,), {})[0]


def _choose(name: str, reference: str, own: Mapping[str, str]) -> ModelChoice:
    task = own.get("--task")
    if task is not None and task not in [known.value for known in Task]:
        raise ConfigError(f"--task: {task!r} is none of {', '.join(known.value for known in Task)}")
    flags = {**({"--served-model-name": name} if name else {}), **own}
    return ModelChoice(
        reference=reference,
        name=name,
        task=Task(task) if task is not None else _task_of(reference),
        worker_flags=tuple(word for pair in flags.items() for word in pair),
    )


def _split(argument: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(argument)
    name, reference = (match[1], match[2]) if match else ("", argument)
    if not reference:
        raise ConfigError("--model: must not be empty")
    return name, reference


def _by_label(flag: str, given: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
    """The values of a flag by the label of their model."""
    values: dict[str, str] = {}
    for argument in given:
        match = _NAMED.fullmatch(argument)
        if match is None and len(labels) > 1:
            raise ConfigError(f"{flag} {argument}: say of which model, as NAME=VALUE; there are {', '.join(labels)}")
        label, value = (match[1], match[2]) if match is not None else (labels[0], argument)
        if label not in labels:
            raise ConfigError(f"{flag} {argument}: no model is called {label}; there are {', '.join(labels)}")
        if label in values:
            raise ConfigError(f"{flag} {argument}: {label} has another one already")
        values[label] = value
    return values


def _label(name: str, reference: str) -> str:
    stem = name or Path(reference).name or reference
    return re.sub(r"[^\w.-]", "-", stem.removesuffix(".gguf"))


def _task_of(reference: str) -> Task:
    """The model's task. A Hub model that is not in the local cache is taken to be generative."""
    if reference in _DEMO_TASKS:
        return _DEMO_TASKS[reference]
    directory = Path(reference).expanduser()
    if directory.is_dir():
        return detect_task(directory)
    return Task.EMBED if _cached_hub_file(reference, "modules.json") else Task.GENERATE


def _cached_hub_file(reference: str, file_name: str) -> bool:
    if reference.endswith(".gguf") or reference.count("/") != 1:
        return False
    from huggingface_hub import try_to_load_from_cache  # a tenth of a second, so only when needed
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(reference, file_name), str)
    except HFValidationError:
        return False  # no Hub id, as the worker will say
