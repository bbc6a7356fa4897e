"""The packed weights of a model as one piece of memory: a header in JSON, then tensors at aligned places.

Made once from the model's files, then read as they are: neither torch nor Transformers takes part.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import NotFusible
from twinstage.models.fused.formats import WeightFormat, pack_linear
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.packing import Floats
from twinstage.models.fused.spec import ModelSpec, read_spec

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """`addresses` of the tensors by name, valid as long as `memory` lives."""

    spec: ModelSpec
    memory: AlignedMemory
    addresses: dict[str, int]

    @staticmethod
    def of(memory: AlignedMemory) -> PackedWeights:
        """What `pack_model` made."""
        (header_bytes,) = struct.unpack_from("<Q", memory.view())
        header = json.loads(bytes(memory.view()[8 : 8 + header_bytes]))
        spec: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in header["spec"].items()
        }
        start = _aligned(8 + header_bytes)
        addresses = {name: memory.address + start + offset for name, offset in header["offsets"].items()}
        return PackedWeights(spec=ModelSpec(**spec), memory=memory, addresses=addresses)


def pack_model(directory: Path, weight_format: WeightFormat, *, progress: Callable[[str], None]) -> AlignedMemory:
    """Pack the model in `directory`. Imports torch and Transformers.

    Raises NotFusible when the model has another shape, or its files other tensors than the shape asks for.
    """
    progress("importing torch and Transformers, once for this model")
    from transformers import AutoConfig

    spec = read_spec(AutoConfig.from_pretrained(directory, local_files_only=True))
    progress(f"packing the weights as {weight_format}, once for this model")
    tensors = dict(_packed(_Checkpoint(directory), spec, weight_format))
    offsets, size = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = size
        size = _aligned(size + tensor.nbytes)
    header = json.dumps({"spec": asdict(spec), "offsets": offsets}).encode()
    start = _aligned(8 + len(header))
    memory = AlignedMemory(start + size)
    memory.view()[: 8 + len(header)] = struct.pack("<Q", len(header)) + header
    for name, tensor in tensors.items():
        memory.array(tensor.dtype, tensor.shape, offset=start + offsets[name])[...] = tensor
    return memory


def _packed(
    checkpoint: _Checkpoint, spec: ModelSpec, weight_format: WeightFormat
) -> Iterator[tuple[str, NDArray[Any]]]:
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


class _Checkpoint:
    """The tensors of a directory's safetensors files as float32."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("model*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str, *shape: int) -> Floats:
        """Raises NotFusible when there is no such tensor, or it has another shape: kernels trust the sizes."""
        if name not in self._files:
            raise NotFusible(f"the weights in {self._directory} lack {name}")
        tensor: Floats = self._files[name].get_tensor(name).float().numpy()
        if tensor.shape != shape:
            raise NotFusible(f"{name} is of shape {list(tensor.shape)}, and the configuration says {list(shape)}")
        return tensor

    def differ(self, name: str, other: str) -> bool:
        """Whether there are both tensors, with other numbers."""
        if name not in self._files or other not in self._files:
            return False
        first, second = self._files[name].get_tensor(name), self._files[other].get_tensor(other)
        return not bool(first.equal(second))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
