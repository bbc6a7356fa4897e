"""What `--model [NAME=]REF` means, decided without loading a model or importing torch."""

from __future__ import annotations

import re
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

    @property
    def label(self) -> str:
        """Short and fit for the names of processes."""
        stem = self.name or Path(self.reference).name or self.reference
        return re.sub(r"[^\w.-]", "-", stem.removesuffix(".gguf"))


def choose_model(argument: str) -> ModelChoice:
    """Read one `--model` argument. Raises ConfigError or ModelError."""
    match = _NAMED.fullmatch(argument)
    name, reference = (match[1], match[2]) if match else ("", argument)
    if not reference:
        raise ConfigError("--model: must not be empty")
    return ModelChoice(reference=reference, name=name, task=_task_of(reference))


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
