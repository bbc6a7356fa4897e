"""Packed weights and compiled code: from checkpoints as they come, and read back only when they are what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from fused_models import tiny_config
from tiny_models import make_tiny_model
from twinstage.errors import NotFusible
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.memory import AlignedMemory, Memory
from twinstage.models.fused.native import NativeProgram, read_header, write_header
from twinstage.models.fused.weights import PackedWeights, pack_model, tensor_bytes

pytestmark = pytest.mark.xdist_group("fused")


def _pack(directory: Path, weight_format: WeightFormat = WeightFormat.INT8) -> AlignedMemory:
    return pack_model(directory, weight_format, progress=lambda _message: None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model, as a checkpoint without its head is whole only then."""
    config = tiny_config("llama", tie_word_embeddings=True, hidden_size=96, intermediate_size=128)
    return make_tiny_model(tmp_path_factory.mktemp("packing") / "llama", config)


@pytest.fixture(scope="module")
def packed(directory: Path) -> bytes:
    return bytes(_pack(directory).view())


def _rewrite(directory: Path, target: Path, names: dict[str, str], *, file: str = "model.safetensors") -> None:
    """Copy a model, its tensors renamed by prefix and kept in `file`."""
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    for old, new in names.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, target / file, metadata={"format": "pt"})
    if file != "model.safetensors":
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))


def test_checkpoints_of_other_layouts_are_packed_alike(directory: Path, packed: bytes, tmp_path: Path) -> None:
    _rewrite(directory, tmp_path / "base", {"model.": ""})
    assert bytes(_pack(tmp_path / "base").view()) == packed
    _rewrite(directory, tmp_path / "shards", {}, file="weights-00001-of-00001.safetensors")
    assert bytes(_pack(tmp_path / "shards").view()) == packed
    _rewrite(directory, tmp_path / "other", {"model.layers.": "model.blocks."})
    with pytest.raises(NotFusible, match=r"lack model\.layers\.0"):
        _pack(tmp_path / "other")


@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(
    directory: Path, tmp_path: Path, weight_format: WeightFormat, number: float
) -> None:
    _rewrite(directory, tmp_path / "bad", {})
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = number
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotFusible, match=r"layers\.1\.mlp\.up_proj\.weight has weights that are infinite"):
        _pack(tmp_path / "bad", weight_format)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_tensors_lie_apart_at_aligned_places(directory: Path, weight_format: WeightFormat) -> None:
    memory = _pack(directory, weight_format)
    weights = PackedWeights.of(memory, weight_format)
    sizes = tensor_bytes(weights.spec, weight_format)
    places = sorted((address - memory.address, sizes[name]) for name, address in weights.addresses.items())
    assert all(start % (4096 if size >= 4096 else 64) == 0 for start, size in places)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] <= memory.size


def _with_header(packed: bytes, changes: dict[str, Any]) -> Memory:
    header, end = read_header(packed)
    return AlignedMemory.of(write_header(header | changes) + packed[end:])


def test_a_header_is_not_trusted(packed: bytes) -> None:
    header, _ = read_header(packed)
    places, spec = header["tensors"], header["spec"]
    PackedWeights.of(_with_header(packed, {}), WeightFormat.INT8)
    broken: list[dict[str, Any]] = [
        {"tensors": places | {"0.QKV": len(packed)}},
        {"tensors": places | {"0.QKV": -4096}},
        {"tensors": places | {"0.QKV": 0}},
        {"tensors": places | {"0.QKV": places["0.QKV"] + 1}},
        {"tensors": places | {"0.QKV": "4096"}},
        {"tensors": {name: place for name, place in places.items() if name != "1.DOWN"}},
        {"tensors": places | {"9.DOWN": 4096}},
        {"tensors": None},
        {"spec": spec | {"num_layers": 3}},
        {"spec": spec | {"vocab_size": 10**9}},
        {"spec": spec | {"hidden_size": -96}},
        {"spec": spec | {"windows": []}},
        {"spec": spec | {"unknown": 1}},
        {"spec": None},
    ]
    for changes in broken:
        with pytest.raises(ValueError, match=r"\w"):
            PackedWeights.of(_with_header(packed, changes), WeightFormat.INT8)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 500, 4000])
def test_what_is_cut_short_is_not_read(packed: bytes, size: int) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        PackedWeights.of(AlignedMemory.of(packed[:size]), WeightFormat.INT8)
    with pytest.raises(ValueError, match=r"\w"):
        PackedWeights.of(AlignedMemory.of(packed[: len(packed) - 4096]), WeightFormat.INT8)


def test_compiled_code_is_read_only_as_a_whole() -> None:
    program = NativeProgram(objects=(b"first", b"second"), symbol="enter")
    data = program.to_bytes()
    assert NativeProgram.from_bytes(data) == program
    damaged = [data[:size] for size in range(len(data))]
    damaged += [data + b"x", write_header({"symbol": "enter", "sizes": [-1, 12]}) + b"firstsecond", b"\xff" * 64]
    damaged += [write_header({"symbol": 3, "sizes": []}), write_header({"sizes": [1]}) + b"x"]
    for wrong in damaged:
        with pytest.raises(ValueError, match=r"\w"):
            NativeProgram.from_bytes(wrong)


def test_a_spec_says_which_tensors_there_are(packed: bytes) -> None:
    spec = PackedWeights.of(AlignedMemory.of(packed), WeightFormat.INT8).spec
    names = tensor_bytes(spec, WeightFormat.INT8).keys()
    more = tensor_bytes(replace(spec, tied_embedding=False, qkv_bias=True, head_norm=True), WeightFormat.INT8).keys()
    added = {"LM_HEAD", "LM_HEAD_SCALE"}
    added |= {f"{layer}.{name}" for layer in range(2) for name in ("QKV_BIAS", "QUERY_NORM", "KEY_NORM")}
    assert more - names == added
