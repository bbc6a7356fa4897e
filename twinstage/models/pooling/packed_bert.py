"""BERT and its kin on packed inputs: no padding, one projection for queries, keys and values, fused linear layers.

Of all inputs of a batch one matrix [tokens, size] is made, which the linear layers take as a whole; only the attention
goes input by input (inputs of one length together). Weights are laid out once for oneDNN, whose linear layers add the
bias, apply GELU or add the residual while the result is still in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from twinstage.models.pooling.heads import Batching
from twinstage.models.pooling.positions import position_ids
from twinstage.types import PoolingInput

_MODEL_TYPES = frozenset({"bert", "roberta", "xlm-roberta", "camembert"})
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")


def is_known(config: Any) -> bool:
    """Whether a model with this config is one of which every step is known here and in `fused/`."""
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act == "gelu"
        and not getattr(config, "is_decoder", False)
        and getattr(config, "position_embedding_type", "absolute") == "absolute"
    )


def can_be_packed(model: Any) -> bool:
    """Whether `model` is known, on a build of torch that has the operators."""
    one_dnn: Any = torch.backends.mkldnn
    return (
        is_known(model.config)
        and one_dnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
    )


class PackedBert:
    """The hidden states of the last layer, in float32. `dtype` is that of weights and of what is between the layers."""

    batching = Batching.PACKED

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        """Takes the weights of a model of Transformers for which `can_be_packed` holds."""
        config = model.config
        self._heads = int(config.num_attention_heads)
        self._padding_id = None if config.model_type == "bert" else int(config.pad_token_id)
        embeddings = model.embeddings
        self._words = embeddings.word_embeddings.weight.detach()
        self._positions = embeddings.position_embeddings.weight.detach()
        self._types = embeddings.token_type_embeddings.weight.detach()
        self._dtype = dtype
        self._norm = _Norm(embeddings.LayerNorm, torch.float32)
        self._layers = [_Layer(layer, dtype) for layer in model.encoder.layer]

    def hidden(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        lengths = [len(entry.token_ids) for entry in inputs]
        states = self._embed(inputs).to(self._dtype)
        runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]
        for layer in self._layers:
            states = layer.run(states, runs, self._heads)
        return states.float()

    def _embed(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        ids = torch.tensor([token_id for entry in inputs for token_id in entry.token_ids])
        states = self._words[ids] + self._positions[torch.tensor(position_ids(inputs, self._padding_id))]
        if any(entry.token_type_ids for entry in inputs):
            types = [kind for entry in inputs for kind in entry.token_type_ids or [0] * len(entry.token_ids)]
            states += self._types[torch.tensor(types)]
        else:
            states += self._types[0]
        return self._norm.run(states)


class _Linear:
    """A linear layer with its weights in oneDNN's order."""

    def __init__(self, *layers: Any, dtype: torch.dtype) -> None:
        """Several layers of the same input become one."""
        weight = torch.cat([layer.weight.detach() for layer in layers]).to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = torch.cat([layer.bias.detach() for layer in layers]).to(dtype)

    def run(self, states: torch.Tensor, then: str = "none") -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, then, [], "none")
        return result

    def run_and_add(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            states, residual, self._weight, self._bias, "add"
        )
        return result


@dataclass(slots=True)
class _Norm:
    """A layer normalization."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.weight, self.bias = layer.weight.detach().to(dtype), layer.bias.detach().to(dtype)
        self.epsilon = layer.eps

    def run(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(states, self.weight.shape, self.weight, self.bias, self.epsilon)


class _Layer:
    """One layer of the encoder."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        own, output = layer.attention.self, layer.attention.output
        self._attended = _Linear(own.query, own.key, own.value, dtype=dtype)
        self._output = _Linear(output.dense, dtype=dtype)
        self._output_norm = _Norm(output.LayerNorm, dtype)
        self._up = _Linear(layer.intermediate.dense, dtype=dtype)
        self._down = _Linear(layer.output.dense, dtype=dtype)
        self._down_norm = _Norm(layer.output.LayerNorm, dtype)

    def run(self, states: torch.Tensor, runs: Sequence[tuple[int, int]], heads: int) -> torch.Tensor:
        """`states` [tokens, size]; `runs` are lengths of inputs, and how many in a row have it."""
        attended = _attend(self._attended.run(states), runs, heads)
        states = self._output_norm.run(self._output.run_and_add(attended, states))
        return self._down_norm.run(self._down.run_and_add(self._up.run(states, "gelu"), states))


def _attend(projected: torch.Tensor, runs: Sequence[tuple[int, int]], heads: int) -> torch.Tensor:
    """Attention of every token to all of its own input; `projected` [tokens, 3 * size] to [tokens, size]."""
    size = projected.shape[1] // 3
    results = []
    parts = torch.split(projected, [length * count for length, count in runs])
    for (length, count), part in zip(runs, parts, strict=True):
        query, key, value = part.view(count, length, 3, heads, size // heads).permute(2, 0, 3, 1, 4)
        result = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        results.append(result.transpose(1, 2).reshape(count * length, size))
    return results[0] if len(results) == 1 else torch.cat(results)
