"""The packed weights of a model as one piece of memory: a header in JSON, then tensors at aligned places.

Made once from the model's files, then read as they are: neither torch nor Transformers takes part.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import ModelError
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

    Raises ModelError when its files lack a tensor, NotFusible when the model has another shape.
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

    def linear(name: str, *parts: str) -> Iterator[tuple[str, NDArray[Any]]]:
        weight = np.concatenate([checkpoint.read(f"{part}.weight") for part in parts])
        for suffix, tensor in pack_linear(weight, weight_format):
            yield name + suffix, tensor

    yield from linear("EMBEDDING", "model.embed_tokens")
    if not spec.tied_embedding:
        yield from linear("LM_HEAD", "lm_head")
    yield "FINAL_NORM", checkpoint.read("model.norm.weight")
    for layer in range(spec.num_layers):
        prefix, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        heads = [f"{attention}.{part}_proj" for part in ("q", "k", "v")]
        yield f"{layer}.INPUT_NORM", checkpoint.read(f"{prefix}.input_layernorm.weight")
        yield from linear(f"{layer}.QKV", *heads)
        if spec.qkv_bias:
            yield f"{layer}.QKV_BIAS", np.concatenate([checkpoint.read(f"{head}.bias") for head in heads])
        if spec.head_norm:
            yield f"{layer}.QUERY_NORM", checkpoint.read(f"{attention}.q_norm.weight")
            yield f"{layer}.KEY_NORM", checkpoint.read(f"{attention}.k_norm.weight")
        yield from linear(f"{layer}.OUTPUT", f"{attention}.o_proj")
        yield f"{layer}.POST_NORM", checkpoint.read(f"{prefix}.post_attention_layernorm.weight")
        yield from linear(f"{layer}.GATE_UP", f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj")
        yield from linear(f"{layer}.DOWN", f"{prefix}.mlp.down_proj")


class _Checkpoint:
    """The tensors of a directory's safetensors files as float32."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("model*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> Floats:
        if name not in self._files:
            raise ModelError(f"the weights in {self._directory} lack {name}")
        tensor: Floats = self._files[name].get_tensor(name).float().numpy()
        return tensor


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
