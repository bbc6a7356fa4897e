"""Weights for dot products of bytes in a whole model, and which machine and model get them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fused_models import FusedOnBlocks, chunk, make_fused, tiny_config, tokens
from twinstage.kv.layout import DTYPE_BYTES
from twinstage.models.fused import formats
from twinstage.models.fused.formats import WeightFormat, format_of, has_bfloat16_dot, kv_dtype_of
from twinstage.models.fused.target import Target, target

pytestmark = pytest.mark.xdist_group("fused")
needs_integer_dot = pytest.mark.skipif(not target().integer_dot, reason="this CPU lacks AVX-512 VNNI and AVX-VNNI")

SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16}
WITH, WITHOUT = Target("a", "+avx2,+avxvnni", 8), Target("b", "+avx2,-avx512vnni", 8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[WeightFormat, FusedOnBlocks]:
    """The same weights in each format."""
    directory = tmp_path_factory.mktemp("formats") / "llama"
    config = tiny_config("llama", **SIZES, tie_word_embeddings=True)
    models = [
        make_fused(directory, config),
        make_fused(directory, config, precision="int8", kv_dtype="bfloat16", threads=2),
    ]
    with pytest.MonkeyPatch.context() as patch:
        without = replace(target(), cpu="x86-64-v3", features="")
        patch.setattr(formats, "target", lambda: without)
        models.append(make_fused(directory, config, precision="int8", kv_dtype="float16"))
    return {model.weight_format: FusedOnBlocks(model, num_blocks=200) for model in models}


@needs_integer_dot
def test_dot_products_of_bytes_are_close_to_fp32(models: dict[WeightFormat, FusedOnBlocks]) -> None:
    prompt = tokens(60)
    expected = models[WeightFormat.FP32].logits(prompt)
    found = models[WeightFormat.AFFINE8].logits(prompt)
    assert 1e-5 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert (found != models[WeightFormat.INT8].logits(prompt)).any()


@needs_integer_dot
def test_their_bits_depend_neither_on_batch_nor_on_chunks(models: dict[WeightFormat, FusedOnBlocks]) -> None:
    model = models[WeightFormat.AFFINE8]
    prompts = [tokens(count, seed=count) for count in (1, 33, 120, 9)]
    alone = [model.logits(prompt) for prompt in prompts]
    blocks = [model.blocks(len(prompt)) for prompt in prompts]
    together = model.step(*(chunk(p, 0, len(p), b) for p, b in zip(prompts, blocks, strict=True)))
    np.testing.assert_array_equal(together, np.stack(alone))
    np.testing.assert_array_equal(model.logits(prompts[2], cuts=(7, 101)), alone[2])


@needs_integer_dot
def test_blocks_of_unequal_arithmetic_are_not_exchanged(models: dict[WeightFormat, FusedOnBlocks]) -> None:
    """Two workers with `int8` on unequal machines refuse each other instead of mixing their keys and values."""
    assert len({model.model.kv_layout(16).fingerprint for model in models.values()}) == 3
    assert len({model.model.numerics for model in models.values()}) == 3


def test_a_machine_gets_the_fastest_it_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "target", lambda: WITH)
    assert format_of("int8", SIZES) is WeightFormat.AFFINE8
    assert format_of("fp32", SIZES) is WeightFormat.FP32
    for changes in ({"hidden_size": 100}, {"intermediate_size": 140}, {"head_dim": 20}):
        assert format_of("int8", SIZES | changes) is WeightFormat.INT8
    monkeypatch.setattr(formats, "target", lambda: WITHOUT)
    assert format_of("int8", SIZES) is WeightFormat.INT8


def test_keys_and_values_are_what_a_machine_multiplies_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bfloat16 = Target("c", "+avx512f,+avx512vnni,+avx512bf16", 16)
    monkeypatch.setattr(formats, "target", lambda: with_bfloat16)
    assert (kv_dtype_of("fp32"), kv_dtype_of("int8")) == ("float32", "bfloat16")
    chosen = {(one, dtype) for one in WeightFormat for dtype in DTYPE_BYTES if has_bfloat16_dot(one, dtype)}
    assert chosen == {(WeightFormat.INT8, "bfloat16"), (WeightFormat.AFFINE8, "bfloat16")}
    for other in (WITH, replace(with_bfloat16, lanes=8), replace(with_bfloat16, features="+avx512f")):
        monkeypatch.setattr(formats, "target", lambda other=other: other)
        assert (kv_dtype_of("fp32"), kv_dtype_of("int8")) == ("float32", "float16")
        assert not any(has_bfloat16_dot(one, "bfloat16") for one in WeightFormat)
