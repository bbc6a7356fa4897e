"""Encoders on own kernels against the modules of Transformers, and what is chosen where they cannot be used."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from twinstage.errors import ConfigError, NotFusible
from twinstage.models.fused.target import target
from twinstage.models.pooling import choose
from twinstage.models.pooling.choose import Choice, choose_backbone
from twinstage.models.pooling.fused.model import FusedBert, cut_into_parts
from twinstage.models.pooling.heads import StockBackbone
from twinstage.models.pooling.packed_bert import PackedBert
from twinstage.models.resolve import default_cache_directory
from twinstage.types import PoolingInput

SIZES = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 200,
}  # fmt: skip
LENGTHS = (97, 1, 48, 49, 130, 16, 33, 12, 60, 7, 100, 2)
needs_integer_dot = pytest.mark.skipif(not target().integer_dot, reason="this CPU multiplies no bytes")


def _model(kind: str = "bert", **changes: Any) -> Any:
    torch.manual_seed(3)
    if kind == "roberta":
        model: Any = RobertaModel(RobertaConfig(**SIZES | {"max_position_embeddings": 250} | changes))
    else:
        model = BertModel(BertConfig(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.05 * torch.randn_like(parameter))  # weights of which every one matters
    return model.eval()


def _inputs(*lengths: int, types: bool = False) -> list[PoolingInput]:
    return [
        PoolingInput(
            token_ids=[(7 * place + 3 * length) % 89 + 1 for place in range(length)],
            token_type_ids=[int(place > length // 2) for place in range(length)] if types else [],
        )
        for length in lengths
    ]


def _fused(model: Any, *, precision: str = "fp32", threads: int = 2) -> FusedBert:
    cache = default_cache_directory()
    return FusedBert(model, precision=precision, threads=threads, cache_directory=cache)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_hidden_states_equal_those_of_transformers_and_depend_on_nothing_else(kind: str) -> None:
    model = _model(kind)
    fused = _fused(model)
    stock = StockBackbone(model, takes_token_types=True)
    with torch.inference_mode():
        inputs = _inputs(*LENGTHS, types=kind == "bert")
        together = fused.hidden(inputs)
        np.testing.assert_allclose(together, stock.hidden(inputs), atol=1e-5)
        # Alone, all threads share the rows; together, each takes whole inputs, and they share the last ones.
        alone = [fused.hidden([entry]) for entry in inputs]
        assert torch.equal(torch.cat(alone), together)
        assert torch.equal(_fused(model, threads=1).hidden(inputs), together)


def test_a_step_does_not_take_what_is_meant_for_the_next_one() -> None:
    fused = _fused(_model(num_hidden_layers=4))
    apart, shared = _inputs(190, 128), _inputs(60)
    with torch.inference_mode():
        expected = fused.hidden(apart), fused.hidden(shared)
        for _ in range(40):  # one thread waits for the other, asleep, at the end of the first
            assert torch.equal(fused.hidden(apart), expected[0])
            assert torch.equal(fused.hidden(shared), expected[1])


@needs_integer_dot
def test_eight_bits_are_close() -> None:
    model = _model()
    inputs = _inputs(*LENGTHS)
    with torch.inference_mode():
        computed = _fused(model, precision="int8").hidden(inputs)
        expected = StockBackbone(model, takes_token_types=False).hidden(inputs)
    assert torch.nn.functional.cosine_similarity(computed, expected).min() > 0.999
    assert (computed - expected).abs().max() > 1e-4  # it is another precision


def test_every_thread_has_as_many_parts_and_the_rest_is_shared() -> None:
    lengths = sorted((5 + index * 37 % 160 for index in range(64)), reverse=True)
    parts, shared = cut_into_parts(lengths, threads=3)
    assert shared is not None
    ends = [0, *(end for _, end in parts)]
    assert [*parts, shared] == list(itertools.pairwise([*ends, len(lengths)]))
    assert len(parts) % 3 == 0
    assert all(end == first + 1 or sum(lengths[first:end]) <= 128 for first, end in parts)
    assert cut_into_parts([60, 50], threads=2) == ([], (0, 2))
    assert cut_into_parts([100, 90, 80], threads=2) == ([(0, 1), (1, 2)], (2, 3))
    assert cut_into_parts([512], threads=1) == ([(0, 1)], None)


def test_other_shapes_and_machines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFusible, match="intermediate_size is 100"):
        _fused(_model(intermediate_size=100))
    with pytest.raises(NotFusible, match="a head has 8 dimensions"):
        _fused(_model(num_attention_heads=8))
    monkeypatch.setattr("twinstage.models.pooling.fused.weights.missing_features", lambda: "AVX2")
    with pytest.raises(NotFusible, match="lacks AVX2"):
        _fused(_model())


def _choose(model: Any, *, weights: str = "auto", dtype: str = "float32") -> Any:
    choice = Choice(weights=weights, dtype=dtype, threads=None, cache_directory=default_cache_directory())
    return choose_backbone(model, choice, name="made up")


def test_the_choice() -> None:
    model = _model()
    assert isinstance(_choose(model), FusedBert)
    assert isinstance(_choose(model, weights="stock"), StockBackbone)
    assert isinstance(_choose(model, dtype="bfloat16"), PackedBert)
    assert isinstance(_choose(_model(num_attention_heads=8), weights="int8"), PackedBert)
    assert isinstance(_choose(_model(hidden_act="relu")), StockBackbone)
    with pytest.raises(ConfigError, match="choose one"):
        _choose(model, weights="int8", dtype="bfloat16")


@contextmanager
def _another_model(model: Any) -> Iterator[None]:
    """As if the kernels computed something else."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.layer[1].output.dense.weight.mul_(1.1)
    with pytest.MonkeyPatch.context() as patch:
        original = choose.difference_of
        patch.setattr(
            choose,
            "difference_of",
            lambda backbone, stock, **sizes: original(backbone, StockBackbone(other, takes_token_types=False), **sizes),
        )
        yield


def test_kernels_that_compute_something_else_are_not_used() -> None:
    model = _model()
    with _another_model(model):
        assert isinstance(_choose(model), PackedBert)
