"""Load a pooling model. The cheap checks come first, before the weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from twinstage.errors import ConfigError, ModelError
from twinstage.models.config_files import (
    embedding_max_model_len,
    is_generator,
    read_json_object,
    transformer_directory,
)
from twinstage.models.pooling import heads
from twinstage.models.pooling.after_pooling import find_activation, load_steps
from twinstage.models.pooling.choose import Choice, choose_backbone
from twinstage.models.pooling.layout import read_pipeline, read_score_pipeline, score_activation, yes_no_ids
from twinstage.models.pooling.model import PoolingFacts, PoolingModel
from twinstage.models.resolve import ResolvedModel, default_cache_directory
from twinstage.types import PoolingInput, PoolingTask, Task


def load_pooling(
    resolved: ResolvedModel,
    threads: int | None = None,
    *,
    max_model_len: int | None = None,
    weights: str = "auto",
    dtype: str = "float32",
    cache_directory: Path | None = None,
) -> PoolingModel:
    """Load `resolved`, computing with `threads` threads (for the whole process; None changes nothing).

    `max_model_len` may only lower the model's limit. `weights` and `dtype` say how embedders run (`choose.Choice`).
    Raises ModelError when the folder asks for what cannot be served, ConfigError for a wrong `max_model_len` or a
    `dtype` that the model does not run in.
    """
    makers = {Task.SCORE: _load_scorer, Task.CLASSIFY: _load_classifier}
    if resolved.task is not Task.EMBED and resolved.task not in makers:
        raise ModelError(
            f"{resolved.name} is for {resolved.task.value}: not an embedding model, nor another that pools"
        )
    limit = embedding_max_model_len(resolved.directory, max_model_len)
    if threads is not None:
        torch.set_num_threads(threads)
    if resolved.task is Task.EMBED:
        cache = cache_directory or default_cache_directory()
        choice = Choice(weights=weights, dtype=dtype, threads=threads, cache_directory=cache)
        loaded = _load_embedder(resolved.directory, limit, choice)
    elif dtype != "float32":
        raise ConfigError(f"{resolved.name} is for {resolved.task.value}, which is computed in float32 only")
    else:
        loaded = makers[resolved.task](resolved.directory, limit)
    (tried,) = loaded.encode([PoolingInput(token_ids=[0])], normalize=False)
    if resolved.task is Task.SCORE and tried.shape != (1,):
        raise ModelError(f"{resolved.directory} gives {tried.size} numbers, where a score is one")
    if not np.isfinite(tried).all():
        raise ModelError(f"the weights in {resolved.directory} give no finite numbers; fetch the files again")
    return loaded


def _load_embedder(directory: Path, limit: int, choice: Choice) -> PoolingModel:
    if not (directory / "modules.json").is_file():
        raise ModelError(f"{directory} is no embedding model: it has no modules.json, which says how it pools")
    pipeline = read_pipeline(directory)
    steps = load_steps(pipeline.after_pooling)
    model = heads.load_encoder(transformer_directory(directory))
    backbone = choose_backbone(model, choice, name=str(directory))
    head = heads.EmbeddingHead(backbone, modes=pipeline.pooling_modes, steps=steps)
    with torch.inference_mode():
        (vector,) = head.compute([PoolingInput(token_ids=[0])], PoolingTask.EMBED)
        (of_tokens,) = head.compute([PoolingInput(token_ids=[0])], PoolingTask.TOKEN_EMBED)
    facts = _facts(Task.EMBED, limit, model, dimensions=len(vector), token_dimensions=of_tokens.shape[1])
    return PoolingModel(head, facts)


def _load_scorer(directory: Path, limit: int) -> PoolingModel:
    home = transformer_directory(directory)
    config = read_json_object(home / "config.json")
    activation = find_activation(score_activation(directory, config))
    if (pipeline := read_score_pipeline(directory)) is not None:
        encoder = heads.load_encoder(home)
        backbone = heads.StockBackbone(encoder, takes_token_types=heads.takes_token_types(home, encoder.config))
        steps = load_steps(pipeline.after_pooling)
        pooled = heads.EmbeddingHead(backbone, modes=pipeline.pooling_modes, steps=steps)
        return PoolingModel(heads.PooledScoreHead(pooled, activation=activation), _facts(Task.SCORE, limit, encoder))
    tokens = yes_no_ids(directory)
    directory = home
    if tokens is not None or is_generator(config):
        yes, no = tokens or _yes_and_no(directory)
        generator = heads.load_generator(directory)
        return PoolingModel(
            heads.YesNoHead(generator, yes=yes, no=no, activation=activation), _facts(Task.SCORE, limit, generator)
        )
    model = heads.load_classifier(directory)
    if model.config.num_labels != 1:
        labels = ", ".join(model.config.id2label.values())
        raise ModelError(f"{directory} has several labels ({labels}) where a score is one number; give --task classify")
    takes_types = heads.takes_token_types(directory, model.config)
    head = heads.ClassifierHead(model, activation=activation, takes_token_types=takes_types)
    return PoolingModel(head, _facts(Task.SCORE, limit, model))


def _load_classifier(directory: Path, limit: int) -> PoolingModel:
    directory = transformer_directory(directory)
    model = heads.load_classifier(directory)
    config = model.config
    one_of_them = config.num_labels > 1 and config.problem_type != "multi_label_classification"
    activation: torch.nn.Module = torch.nn.Softmax(dim=-1) if one_of_them else torch.nn.Sigmoid()
    takes_types = heads.takes_token_types(directory, config)
    head = heads.ClassifierHead(model, activation=activation, takes_token_types=takes_types)
    labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    return PoolingModel(head, _facts(Task.CLASSIFY, limit, model, labels=labels))


def _facts(task: Task, limit: int, model: Any, **facts: Any) -> PoolingFacts:
    vocab_size = int(model.get_input_embeddings().num_embeddings)
    return PoolingFacts(task=task, max_model_len=limit, vocab_size=vocab_size, **facts)


def _yes_and_no(directory: Path) -> tuple[int, int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    if yes is None or no is None:
        raise ModelError(f"the tokenizer in {directory} has no tokens 'yes' and 'no', between which a reranker chooses")
    return yes, no
