"""A model's files, found and looked at before anything heavy is imported, so that a wrong path fails at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinstage.errors import ModelError
from twinstage.hosting.settings import WorkerSettings
from twinstage.models.config_files import read_json_object, vocabulary_size
from twinstage.models.resolve import ResolvedModel, resolve_model
from twinstage.telemetry.log import get_logger
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.text.tokenizer import TextTokenizer

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model's files and its tokenizer; no weights are loaded yet."""

    resolved: ResolvedModel
    bundle: TokenizerBundle


def find_model(settings: WorkerSettings) -> FoundModel:
    """Resolve the model reference and read the tokenizer. Raises ModelError."""
    resolved = resolve_model(
        settings.model, settings.revision, cache_directory=settings.cache_directory, progress=report_progress
    )
    bundle = read_bundle(resolved.directory, tokenizer_directory=settings.tokenizer)
    if settings.tokenizer is not None:
        _check_sizes(resolved, bundle, settings.tokenizer)
    return FoundModel(resolved=resolved, bundle=bundle)


def _check_sizes(resolved: ResolvedModel, bundle: TokenizerBundle, tokenizer: Path) -> None:
    """Raises ModelError when the tokenizer has ids that the model lacks."""
    known = vocabulary_size(read_json_object(resolved.directory / "config.json"))
    wanted = TextTokenizer(bundle).vocab_size
    if wanted > known:
        raise ModelError(f"--tokenizer {tokenizer} has {wanted} tokens, and the model {known}: it is of another model")


def report_progress(message: str) -> None:
    """Log what takes time."""
    logger.info("loading", step=message)
