"""The packed weights of a model as one piece of memory: a header in JSON, then tensors at aligned places.

Made once from the model's files, then read as they are: neither torch nor Transformers takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import InternalError, NotFusible
from twinstage.models.fused.checkpoint import Checkpoint
from twinstage.models.fused.formats import WeightFormat, linear_bytes, pack_linear
from twinstage.models.fused.memory import AlignedMemory, Memory
from twinstage.models.fused.native import read_header, write_header
from twinstage.models.fused.spec import ModelSpec, read_spec

_ALIGNMENT = 64
_PAGE_BYTES = 4096  # at whose multiples larger tensors begin


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """`addresses` of the tensors by name, valid as long as `memory` lives."""

    spec: ModelSpec
    memory: Memory
    addresses: dict[str, int]

    @staticmethod
    def of(memory: Memory, weight_format: WeightFormat) -> PackedWeights:
        """What `pack_model` made.

        Raises ValueError unless the tensors are those that the spec in the header asks for, of their sizes, and lie
        within the memory: kernels trust them.
        """
        header, end = read_header(memory.view())
        spec, places = _spec_of(header.get("spec")), header.get("tensors")
        sizes = tensor_bytes(spec, weight_format)
        if not isinstance(places, dict) or places.keys() != sizes.keys():
            raise ValueError("its tensors are not those of its model")
        for name, size in sizes.items():
            start = places[name]
            if type(start) is not int or start % _ALIGNMENT or not end <= start <= memory.size - size:
                raise ValueError(f"tensor {name} of {size} bytes lies at {start}, in {memory.size} bytes")
        addresses = {name: memory.address + start for name, start in places.items()}
        return PackedWeights(spec=spec, memory=memory, addresses=addresses)


def pack_model(directory: Path, weight_format: WeightFormat, *, progress: Callable[[str], None]) -> AlignedMemory:
    """Pack the model in `directory`. Imports torch and Transformers.

    Raises NotFusible when the model has another shape, or its files other tensors than the shape asks for, and
    ModelError when they are damaged.
    """
    progress("importing torch and Transformers, once for this model")
    from transformers import AutoConfig

    spec = read_spec(AutoConfig.from_pretrained(directory, local_files_only=True))
    progress(f"packing the weights as {weight_format}, once for this model")
    sizes = tensor_bytes(spec, weight_format)
    start = _aligned(_header_room(spec, sizes))
    places: dict[str, int] = {}
    for name, size in sizes.items():
        places[name] = start if size < _PAGE_BYTES else _aligned(start, _PAGE_BYTES)
        start = _aligned(places[name] + size)
    memory = AlignedMemory(start)
    header = write_header({"spec": asdict(spec), "tensors": places})
    memory.view()[: len(header)] = header
    for name, tensor in _packed(Checkpoint(directory), spec, weight_format):
        if tensor.nbytes != sizes[name]:
            raise InternalError(f"{name} was packed into {tensor.nbytes} bytes, not {sizes[name]}")
        memory.array(tensor.dtype, tensor.shape, offset=places[name])[...] = tensor
    return memory


def tensor_bytes(spec: ModelSpec, weight_format: WeightFormat) -> dict[str, int]:
    """Names and sizes of all tensors that a model with this spec has when it is packed."""
    found: dict[str, int] = {"FINAL_NORM": 4 * spec.hidden_size}

    def linear(name: str, outputs: int, inputs: int) -> None:
        for suffix, size in linear_bytes(outputs, inputs, weight_format).items():
            found[name + suffix] = size

    linear("EMBEDDING", spec.vocab_size, spec.hidden_size)
    if not spec.tied_embedding:
        linear("LM_HEAD", spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        linear(f"{layer}.QKV", spec.qkv_size, spec.hidden_size)
        linear(f"{layer}.OUTPUT", spec.hidden_size, spec.query_size)
        linear(f"{layer}.GATE_UP", 2 * spec.intermediate_size, spec.hidden_size)
        linear(f"{layer}.DOWN", spec.hidden_size, spec.intermediate_size)
        found |= {f"{layer}.{norm}": 4 * spec.hidden_size for norm in ("INPUT_NORM", "POST_NORM")}
        if spec.qkv_bias:
            found[f"{layer}.QKV_BIAS"] = 4 * spec.qkv_size
        if spec.head_norm:
            found |= {f"{layer}.{norm}": 4 * spec.head_dim for norm in ("QUERY_NORM", "KEY_NORM")}
    return found


def _header_room(spec: ModelSpec, sizes: Mapping[str, int]) -> int:
    """Bytes that are enough for the header, whatever the places are."""
    longest = sum(sizes.values()) + len(sizes) * 2 * _PAGE_BYTES + 2**32
    return len(write_header({"spec": asdict(spec), "tensors": dict.fromkeys(sizes, longest)}))


def _spec_of(fields: object) -> ModelSpec:
    """The spec that a header holds. Raises ValueError when it is none."""
    if not isinstance(fields, dict):
        raise ValueError("its header has no spec")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    try:
        spec = ModelSpec(**values)
    except TypeError as error:
        raise ValueError(f"its spec is of another kind: {error}") from error
    counts = (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads)
    if not all(type(count) is int and count > 0 for count in (*counts, spec.head_dim, spec.vocab_size)):
        raise ValueError("its spec has sizes that are no positive numbers")
    if len(spec.windows) != spec.num_layers or 2 * len(spec.inverse_frequencies) != spec.head_dim:
        raise ValueError("its spec has not one window for each layer, or not one frequency for each pair")
    return spec


def _packed(checkpoint: Checkpoint, spec: ModelSpec, weight_format: WeightFormat) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and tensors as `LayerField` and `StepField` know them, those of a layer with its number before."""
    hidden, intermediate, vocab = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    sizes = {"q": spec.query_size, "k": spec.num_kv_heads * spec.head_dim, "v": spec.num_kv_heads * spec.head_dim}

    def linear(name: str, inputs: int, parts: Mapping[str, int]) -> Iterator[tuple[str, NDArray[Any]]]:
        weight = np.concatenate([checkpoint.read(f"{part}.weight", outputs, inputs) for part, outputs in parts.items()])
        for suffix, tensor in pack_linear(weight, weight_format):
            yield name + suffix, tensor

    yield from linear("EMBEDDING", hidden, {"model.embed_tokens": vocab})
    if not spec.tied_embedding:
        yield from linear("LM_HEAD", hidden, {"lm_head": vocab})
    elif checkpoint.differ("model.embed_tokens.weight", "lm_head.weight"):
        raise NotFusible("its configuration ties head and embedding, which differ in its files")
    yield "FINAL_NORM", checkpoint.read("model.norm.weight", hidden)
    for layer in range(spec.num_layers):
        prefix, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        heads = {f"{attention}.{part}_proj": size for part, size in sizes.items()}
        yield f"{layer}.INPUT_NORM", checkpoint.read(f"{prefix}.input_layernorm.weight", hidden)
        yield from linear(f"{layer}.QKV", hidden, heads)
        if spec.qkv_bias:
            biases = [checkpoint.read(f"{head}.bias", size) for head, size in heads.items()]
            yield f"{layer}.QKV_BIAS", np.concatenate(biases)
        if spec.head_norm:
            yield f"{layer}.QUERY_NORM", checkpoint.read(f"{attention}.q_norm.weight", spec.head_dim)
            yield f"{layer}.KEY_NORM", checkpoint.read(f"{attention}.k_norm.weight", spec.head_dim)
        yield from linear(f"{layer}.OUTPUT", spec.query_size, {f"{attention}.o_proj": hidden})
        yield f"{layer}.POST_NORM", checkpoint.read(f"{prefix}.post_attention_layernorm.weight", hidden)
        gate_up = {f"{prefix}.mlp.{part}_proj": intermediate for part in ("gate", "up")}
        yield from linear(f"{layer}.GATE_UP", hidden, gate_up)
        yield from linear(f"{layer}.DOWN", intermediate, {f"{prefix}.mlp.down_proj": hidden})


def _aligned(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
