"""A model's files, found and looked at before anything heavy is imported, so that a wrong path fails at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from twinstage.errors import ModelError
from twinstage.hosting.settings import WorkerSettings
from twinstage.models.config_files import is_generator, read_json_object, transformer_directory, vocabulary_size
from twinstage.models.resolve import ResolvedModel, resolve_model
from twinstage.telemetry.log import get_logger
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.text.score_template import with_score_template
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import Task

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model's files and its tokenizer; no weights are loaded yet."""

    resolved: ResolvedModel
    bundle: TokenizerBundle


def find_model(settings: WorkerSettings) -> FoundModel:
    """Resolve the model reference and read the tokenizer. Raises ModelError."""
    resolved = resolve_model(
        settings.model,
        settings.revision,
        task=None if settings.task == "auto" else Task(settings.task),
        cache_directory=settings.cache_directory,
        progress=report_progress,
    )
    bundle = read_bundle(resolved.directory, tokenizer_directory=settings.tokenizer)
    if resolved.task is Task.SCORE and is_generator(
        read_json_object(transformer_directory(resolved.directory) / "config.json")
    ):
        bundle = replace(bundle, score_template=_score_template(bundle, resolved.directory / "score_template.jinja"))
    if settings.tokenizer is not None:
        _check_sizes(resolved, bundle, settings.tokenizer)
    return FoundModel(resolved=resolved, bundle=bundle)


def _score_template(bundle: TokenizerBundle, path: Path) -> str:
    return with_score_template(bundle, path.read_text(encoding="utf-8") if path.is_file() else None)


def _check_sizes(resolved: ResolvedModel, bundle: TokenizerBundle, tokenizer: Path) -> None:
    """Raises ModelError when the tokenizer has ids that the model lacks."""
    known = vocabulary_size(read_json_object(transformer_directory(resolved.directory) / "config.json"))
    wanted = TextTokenizer(bundle).vocab_size
    if wanted > known:
        raise ModelError(f"--tokenizer {tokenizer} has {wanted} tokens, and the model {known}: it is of another model")


def report_progress(message: str) -> None:
    """Log what takes time."""
    logger.info("loading", step=message)
