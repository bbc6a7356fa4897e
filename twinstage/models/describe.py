"""A model as the router and its clients see it. Free of torch."""

from __future__ import annotations

from twinstage.models.config_files import read_json_object, transformer_directory, vocabulary_size
from twinstage.models.resolve import ResolvedModel
from twinstage.types import ModelDescription


def describe_model(
    resolved: ResolvedModel,
    *,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    tokenizer_fingerprint: str,
    served_model_name: str | None = None,
    embedding_dimensions: int = 0,
    token_dimensions: int = 0,
    labels: tuple[str, ...] = (),
) -> ModelDescription:
    """Describe a loaded model. `max_model_len` is the effective one; the tokenizer's facts come from its bundle.

    Raises ModelError when config.json does not name the size of the vocabulary.
    """
    return ModelDescription(
        name=served_model_name or resolved.name,
        fingerprint=resolved.fingerprint,
        task=resolved.task,
        max_model_len=max_model_len,
        vocab_size=vocabulary_size(read_json_object(transformer_directory(resolved.directory) / "config.json")),
        eos_token_ids=eos_token_ids,
        tokenizer_fingerprint=tokenizer_fingerprint,
        embedding_dimensions=embedding_dimensions,
        token_dimensions=token_dimensions,
        labels=labels,
    )
