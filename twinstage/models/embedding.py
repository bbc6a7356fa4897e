"""Embedding models: a sentence-transformers folder that is Transformer, mean Pooling and maybe Normalize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinstage.errors import FieldViolation, InvalidRequest, ModelError, TaskNotSupported
from twinstage.models.config_files import embedding_max_model_len, read_json_list, read_optional_json_object
from twinstage.models.load import check_loading, quiet_loading
from twinstage.models.resolve import ResolvedModel
from twinstage.types import PoolingInput, PoolingTask, Task

_MAX_BATCH_TOKENS = 4096  # padding included

# sentence-transformers before 6 wrote one flag for each way of pooling.
_LEGACY_POOLING_PREFIX = "pooling_mode_"
_LEGACY_MEAN = "pooling_mode_mean_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPipeline:
    """What modules.json says: where the transformer lies and what follows the pooling."""

    transformer_directory: Path
    normalizes: bool


class EmbeddingModel:
    """Token ids to vectors. Not thread-safe. Made by `load`."""

    def __init__(self, model: Any, *, max_model_len: int, normalizes: bool) -> None:
        self._model = model
        self._normalizes = normalizes
        self._pad_token_id = int(model.config.pad_token_id or 0)
        self._vocab_size = int(model.config.vocab_size)
        self.max_model_len = max_model_len
        self.dimensions = int(model.config.hidden_size)

    @staticmethod
    def load(
        resolved: ResolvedModel, threads: int | None = None, *, max_model_len: int | None = None
    ) -> EmbeddingModel:
        """Load `resolved` in float32, computing with `threads` threads (for the whole process; None changes nothing).

        `max_model_len` may only lower the model's limit. Raises ModelError when the folder asks for something else than
        mean pooling, ConfigError for a wrong `max_model_len`.
        """
        if resolved.task is not Task.EMBED:
            raise ModelError(f"{resolved.name} is not an embedding model (it has no modules.json)")
        limit = embedding_max_model_len(resolved.directory, max_model_len)
        pipeline = read_pipeline(resolved.directory)
        if threads is not None:
            torch.set_num_threads(threads)
        model = _load_encoder(pipeline.transformer_directory)
        return EmbeddingModel(model, max_model_len=limit, normalizes=pipeline.normalizes)

    def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask = PoolingTask.EMBED, normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        """One vector for each input (special tokens included): float32 `[dimensions]`.

        `normalize` scales the vectors to length 1; a model that does so by itself does it in any case. Raises
        InvalidRequest when an input is empty, too long or has unknown ids, TaskNotSupported for other tasks than EMBED;
        nothing is computed then.
        """
        if task is not PoolingTask.EMBED or any(entry.prompt_tokens for entry in inputs):
            raise TaskNotSupported(f"this model cannot do {task.value}, or leave out prompts")
        token_ids = [entry.token_ids for entry in inputs]
        self._check(token_ids)
        vectors = np.empty((len(token_ids), self.dimensions), dtype=np.float32)
        for batch in _batches([len(ids) for ids in token_ids]):
            vectors[batch] = self._encode_batch([token_ids[index] for index in batch], normalize).numpy()
        return list(vectors)

    def _encode_batch(self, token_ids: Sequence[Sequence[int]], normalize: bool) -> torch.Tensor:
        longest = max(len(ids) for ids in token_ids)
        padded = [[*ids, *[self._pad_token_id] * (longest - len(ids))] for ids in token_ids]
        lengths = torch.tensor([len(ids) for ids in token_ids]).unsqueeze(1)
        mask = (torch.arange(longest) < lengths).long()  # [inputs, longest]
        with torch.inference_mode():
            hidden = self._model(input_ids=torch.tensor(padded), attention_mask=mask).last_hidden_state
            vectors: torch.Tensor = (hidden * mask.unsqueeze(2)).sum(dim=1) / lengths
            if normalize or self._normalizes:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors

    def _check(self, token_ids: Sequence[Sequence[int]]) -> None:
        violations = []
        for index, ids in enumerate(token_ids):
            if not 1 <= len(ids) <= self.max_model_len:
                problem = f"has {len(ids)} tokens; 1 to {self.max_model_len} are allowed"
                violations.append(FieldViolation(f"inputs[{index}].token_ids", problem))
            elif not (min(ids) >= 0 and max(ids) < self._vocab_size):
                problem = f"has ids outside 0 to {self._vocab_size - 1}"
                violations.append(FieldViolation(f"inputs[{index}].token_ids", problem))
        if violations:
            raise InvalidRequest(violations)


def read_pipeline(directory: Path) -> EmbeddingPipeline:
    """Read modules.json. Raises ModelError for anything but Transformer, mean Pooling and Normalize, in this order."""
    modules = read_json_list(directory / "modules.json")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{directory} is made of {', '.join(kinds)}; only Transformer, Pooling, Normalize can be served"
        )
    pooling_path = directory / str(modules[1].get("path", "")) / "config.json"
    modes = _pooling_modes(read_optional_json_object(pooling_path))
    if modes != ["mean"]:
        raise ModelError(f"{pooling_path} asks for {' and '.join(modes)} pooling; only mean can be served")
    settings = read_optional_json_object(directory / "config_sentence_transformers.json")
    prompt_name = settings.get("default_prompt_name")
    if prompt_name and (settings.get("prompts") or {}).get(prompt_name):
        raise ModelError(
            f"{directory} puts a prompt of its own ({prompt_name!r}) before every text, which is not served"
        )
    return EmbeddingPipeline(
        transformer_directory=directory / str(modules[0].get("path", "")), normalizes="Normalize" in kinds
    )


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    """The ways of pooling that are asked for; sentence-transformers' default is mean."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return [mode] if isinstance(mode, str) else [str(entry) for entry in mode]
    flags = [key for key, value in config.items() if key.startswith(_LEGACY_POOLING_PREFIX) and value]
    names = ["mean" if flag == _LEGACY_MEAN else flag.removeprefix(_LEGACY_POOLING_PREFIX) for flag in flags]
    return names or ["mean"]


def _load_encoder(directory: Path) -> Any:
    from transformers import AutoModel  # seconds to import, which the checks above need not wait for

    model_class: Any = AutoModel
    with quiet_loading(directory):
        model, info = model_class.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    # The pooler is a head that mean pooling leaves unused, so some folders lack its weights.
    missing = {name for name in info["missing_keys"] if not name.startswith("pooler.")}
    check_loading({"missing_keys": missing}, directory)
    return model.eval()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of the inputs, the longest first, in batches that are small when padded to their longest."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > _MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
