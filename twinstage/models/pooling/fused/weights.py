"""The weights of a model of Transformers in the order in which kernels read them, and which models can be taken."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from numpy.typing import NDArray

from twinstage.errors import NotFusible
from twinstage.models.fused.formats import WeightFormat, pack_linear
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.target import missing_features
from twinstage.models.pooling.fused.fields import EncoderField, EncoderLayerField

_SIZE_MULTIPLE = 32  # whole panels of every target, and whole groups of 8-bit weights
_PAGE = 4096
_HEAD_MULTIPLE = 16  # the attention's vectors


def check_encoder(config: Any) -> None:
    """Raise NotFusible, naming the reason, when the kernels are not made for a model with this config, or machine."""
    if lacking := missing_features():
        raise NotFusible(f"this machine lacks {lacking}")
    head_dim, rest = divmod(config.hidden_size, config.num_attention_heads)
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % _SIZE_MULTIPLE:
            raise NotFusible(f"{name} is {size}, not a multiple of {_SIZE_MULTIPLE}")
    if rest or head_dim % _HEAD_MULTIPLE:
        raise NotFusible(f"a head has {head_dim} dimensions, not a multiple of {_HEAD_MULTIPLE}")


class EncoderWeights:
    """Addresses of the tensors, valid as long as this object lives."""

    def __init__(self, model: Any, weight_format: WeightFormat) -> None:
        self._memory: list[object] = []
        self._format = weight_format
        embeddings = model.embeddings
        self.model = {
            EncoderField.WORDS: self._keep(embeddings.word_embeddings.weight),
            EncoderField.POSITIONS: self._keep(embeddings.position_embeddings.weight),
            EncoderField.TYPES: self._keep(embeddings.token_type_embeddings.weight),
            EncoderField.NORM: self._keep(embeddings.LayerNorm.weight),
            EncoderField.NORM_BIAS: self._keep(embeddings.LayerNorm.bias),
        }
        self.layers = [self._layer(layer) for layer in model.encoder.layer]

    def _layer(self, layer: Any) -> dict[EncoderLayerField, int]:
        own, output = layer.attention.self, layer.attention.output
        parts = own.query, own.key, own.value
        found: dict[EncoderLayerField, int] = {}
        packed: dict[EncoderLayerField, NDArray[Any]] = {}
        for name, linears in (
            ("QKV", parts),
            ("OUTPUT", (output.dense,)),
            ("UP", (layer.intermediate.dense,)),
            ("DOWN", (layer.output.dense,)),
        ):
            weight = torch.cat([linear.weight.detach() for linear in linears]).numpy()
            packed |= {EncoderLayerField[name + suffix]: made for suffix, made in pack_linear(weight, self._format)}
            found[EncoderLayerField[f"{name}_BIAS"]] = self._keep(torch.cat([linear.bias for linear in linears]))
        for name, norm in (("OUTPUT_NORM", output.LayerNorm), ("DOWN_NORM", layer.output.LayerNorm)):
            found[EncoderLayerField[name]] = self._keep(norm.weight)
            found[EncoderLayerField[f"{name}_BIAS"]] = self._keep(norm.bias)
        return found | self._copy(packed)

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a float32 tensor, which is not copied."""
        kept = tensor.detach().contiguous()
        self._memory.append(kept)
        return kept.data_ptr()

    def _copy(self, tensors: dict[EncoderLayerField, NDArray[Any]]) -> dict[EncoderLayerField, int]:
        """The addresses of copies in one piece of memory, aligned as register tiles need them, in large pages."""
        sizes = [-(-values.nbytes // _PAGE) * _PAGE for values in tensors.values()]
        places = list(itertools.accumulate(sizes, initial=0))
        memory = AlignedMemory(places[-1])
        self._memory.append(memory)
        for place, values in zip(places, tensors.values(), strict=False):
            memory.array(values.dtype, values.shape, offset=place)[...] = values
        return {field: memory.address + place for field, place in zip(tensors, places, strict=False)}
