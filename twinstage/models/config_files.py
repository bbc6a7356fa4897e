"""What a model's JSON files say, read without Transformers: task, limits, vocabulary. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from twinstage.errors import ConfigError, ModelError
from twinstage.types import Task

# Transformers numbers the positions of these from `pad_token_id + 1`, so that many fewer are usable.
_OFFSET_POSITION_MODEL_TYPES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet", "longformer"})
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_LONGROPE_TYPES = frozenset({"longrope", "su"})


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError when it is missing or something else."""
    document = _read_json(path)
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the file again")
    return document


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The JSON list of objects in a file. Raises ModelError when it is missing or something else."""
    document = _read_json(path)
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise ModelError(f"{path} holds no JSON list of objects; fetch the file again")
    return document


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """As `read_json_object`, but empty when there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def read_modules(directory: Path) -> list[tuple[str, Path]]:
    """The modules that sentence-transformers' modules.json joins: the class of each, and its place.

    There are none where there is no such file. Raises ModelError for one that cannot be read.
    """
    path = directory / "modules.json"
    entries = read_json_list(path) if path.is_file() else []
    return [
        (str(entry.get("type", "")).rpartition(".")[2], directory / str(entry.get("path", ""))) for entry in entries
    ]


def transformer_directory(directory: Path) -> Path:
    """Where a model has its config, weights and tokenizer: `directory`, unless its modules.json names another."""
    return next((path for kind, path in read_modules(directory) if kind == "Transformer"), directory)


def detect_task(directory: Path) -> Task:
    """What the model in `directory` is for, as far as its files tell.

    What they do not tell, the operator says: classifiers of several labels and rerankers that generate look like
    models for generation. Raises ModelError when there is no config.json.
    """
    if (directory / "modules.json").is_file():
        return Task.SCORE if pipeline_settings(directory).get("model_type") == "CrossEncoder" else Task.EMBED
    return Task.SCORE if _is_one_label_classifier(read_json_object(directory / "config.json")) else Task.GENERATE


def is_generator(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a causal language model."""
    architectures = config.get("architectures") or [""]
    return str(architectures[0]).endswith("ForCausalLM")


def effective_max_model_len(config: Mapping[str, Any], requested: int | None = None) -> int:
    """The longest sequence to serve, in tokens: the model's own limit, or `requested`, which may only lower it.

    `config` is the content of config.json. Raises ModelError when it names no limit, ConfigError when `requested` is
    not positive or above the limit.
    """
    limit = _position_limit(config)
    if limit is None:
        raise ModelError("config.json names no max_position_embeddings, neither at its root nor in text_config")
    switch = _longrope_switch(config)
    if switch is None or switch >= limit:
        return _lowered(limit, requested, why="the model's limit")
    why = "where the model's rotary embedding changes with the longest sequence in a batch"
    return _lowered(switch, requested, why=why)


def embedding_max_model_len(directory: Path, requested: int | None = None) -> int:
    """The longest input of a pooling model, special tokens included. Errors as above."""
    directory = transformer_directory(directory)
    config = read_json_object(directory / "config.json")
    positions = _position_limit(config)
    if positions is not None and config.get("model_type") in _OFFSET_POSITION_MODEL_TYPES:
        positions -= int(config.get("pad_token_id") or 0) + 1
    configured = read_optional_json_object(directory / "sentence_bert_config.json").get("max_seq_length")
    tokenizer_limit = read_optional_json_object(directory / "tokenizer_config.json").get("model_max_length")
    if not _is_positive_int(configured):
        configured = tokenizer_limit
    limits = [limit for limit in (configured, positions) if _is_positive_int(limit)]
    if not limits:
        raise ModelError(f"{directory} names no max_seq_length, model_max_length or max_position_embeddings")
    return _lowered(min(limits), requested, why="the model's limit")


def vocabulary_size(config: Mapping[str, Any]) -> int:
    """Number of token ids, by config.json. Raises ModelError when it does not say."""
    for document in _roots(config):
        if _is_positive_int(document.get("vocab_size")):
            return int(document["vocab_size"])
    raise ModelError("config.json names no vocab_size")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; is it a model directory?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); fetch the file again") from error


def _lowered(limit: int, requested: int | None, *, why: str) -> int:
    if requested is None:
        return limit
    if requested < 1:
        raise ConfigError(f"max_model_len must be at least 1, not {requested}")
    if requested > limit:
        raise ConfigError(f"max_model_len {requested} is above {limit}, {why}; choose at most {limit}")
    return requested


def _roots(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def _position_limit(config: Mapping[str, Any]) -> int | None:
    for document in _roots(config):
        for key in ("max_position_embeddings", "n_positions"):  # the second is GPT-2's name for the first
            if _is_positive_int(document.get(key)):
                return int(document[key])
    return None


def _longrope_switch(config: Mapping[str, Any]) -> int | None:
    """Length above which LongRoPE takes its other factors for a whole batch; None for every other rotary embedding."""
    for document in _roots(config):
        for rope in (document.get(key) for key in _ROPE_KEYS):
            if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _LONGROPE_TYPES:
                original = rope.get(
                    "original_max_position_embeddings", document.get("original_max_position_embeddings")
                )
                return int(original) if _is_positive_int(original) else None
    return None


def _is_one_label_classifier(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    return str(architectures[0]).endswith("ForSequenceClassification") and num_labels == 1


def pipeline_settings(directory: Path) -> dict[str, Any]:
    """What sentence-transformers keeps beside its modules; empty where it is absent or cannot be read."""
    try:
        return read_optional_json_object(directory / "config_sentence_transformers.json")
    except ModelError:
        return {}


def _is_positive_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
