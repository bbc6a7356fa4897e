"""A model's files, found and looked at before anything heavy is imported, so that a wrong path fails at once."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.hosting.settings import WorkerSettings
from twinstage.models.resolve import ResolvedModel, resolve_model
from twinstage.telemetry.log import get_logger
from twinstage.text.bundle import TokenizerBundle, read_bundle

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
    return FoundModel(resolved=resolved, bundle=read_bundle(resolved.directory))


def report_progress(message: str) -> None:
    """Log what takes time."""
    logger.info("loading", step=message)
