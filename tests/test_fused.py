"""The fused path against stock Transformers, and that a row's bits depend on its own sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fused_models import BLOCK_SIZE, FusedOnBlocks, chunk, make_fused, stock_logits, tiny_config, tokens
from twinstage.models.fused.load import load_fused
from twinstage.models.resolve import resolve_model

pytestmark = pytest.mark.xdist_group("fused")
TOLERANCE = 1e-4

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-heads-of-80-tied": ("llama", {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 19}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1}),
}


# In int8 on KV in 16 bits. With the second sizes, processors that can use dot products of bytes, and of bfloat16.
KINDS: dict[str, dict[str, Any]] = {"float16": {}, "bfloat16": {"hidden_size": 96, "intermediate_size": 160}}


def make_llama(directory: Path, kv_dtype: str, *, threads: int) -> FusedOnBlocks:
    config = tiny_config("llama", **KINDS[kv_dtype])
    model = make_fused(directory, config, precision="int8", kv_dtype=kv_dtype, threads=threads)
    return FusedOnBlocks(model, num_blocks=1200)


@pytest.fixture(scope="module", params=KINDS)
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FusedOnBlocks:
    """With two threads."""
    return make_llama(tmp_path_factory.mktemp("fused") / "llama", request.param, threads=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_stock(family: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    fused = FusedOnBlocks(make_fused(tmp_path / family, tiny_config(model_type, **changes)))
    prompt = tokens(70)
    expected = stock_logits(tmp_path / family, prompt)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(fused.logits(prompt), expected[-1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(fused.logits(prompt[:33], cuts=(1, 20)), expected[32], rtol=0, atol=TOLERANCE)


def test_bits_do_not_depend_on_the_batch(llama: FusedOnBlocks) -> None:
    """Prefill chunks and decode rows of several sequences in one step, and each alone."""
    prompts = [tokens(count, seed=count) for count in (1, 3, 64, 30, 7, 90)]
    alone = [llama.logits(prompt) for prompt in prompts]
    blocks = [llama.blocks(len(prompt)) for prompt in prompts]
    starts = [0, 2, 63, 10, 0, 20]  # all but the first need earlier tokens first
    llama.step(*(chunk(p, 0, s, b) for p, s, b in zip(prompts, starts, blocks, strict=True) if s))
    together = llama.step(*(chunk(p, s, len(p), b) for p, s, b in zip(prompts, starts, blocks, strict=True)))
    np.testing.assert_array_equal(together, np.stack(alone))


def test_bits_do_not_depend_on_how_many_rows_are_wanted(llama: FusedOnBlocks) -> None:
    """Several of the last rows of some chunks, all of others and one of the rest, in one step; and each row alone."""
    prompts = [tokens(count, seed=count) for count in (40, 9, 3, 64, 5)]
    wanted = [40, 4, 3, 17, 1]
    starts = [0, 5, 0, 20, 4]
    alone = [
        llama.logits(prompt[:end])
        for prompt, count in zip(prompts, wanted, strict=True)
        for end in range(len(prompt) - count + 1, len(prompt) + 1)
    ]
    blocks = [llama.blocks(len(prompt)) for prompt in prompts]
    llama.step(*(chunk(p, 0, s, b) for p, s, b in zip(prompts, starts, blocks, strict=True) if s))
    chunks = [
        replace(chunk(prompt, start, len(prompt), table), num_logits=count)
        for prompt, start, table, count in zip(prompts, starts, blocks, wanted, strict=True)
    ]
    np.testing.assert_array_equal(llama.step(*chunks), np.stack(alone))
    np.testing.assert_array_equal(llama.step(*chunks[:1], *chunks[2:3]), np.stack([*alone[:40], *alone[44:47]]))


def test_chunks_that_do_not_sample_change_nothing(llama: FusedOnBlocks) -> None:
    """The last layer is computed for the sampled rows alone; keys and values of the others are there all the same."""
    prompts = [tokens(count, seed=count) for count in (40, 50, 25, 60)]
    alone = np.stack([llama.logits(prompt) for prompt in prompts])
    blocks = [llama.blocks(len(prompt)) for prompt in prompts]
    ends = [21, 50, 24, 60]
    some = llama.step(*(chunk(p, 0, end, b) for p, end, b in zip(prompts, ends, blocks, strict=True)))
    np.testing.assert_array_equal(some, alone[[1, 3]])
    rest = llama.step(chunk(prompts[0], 21, 40, blocks[0]), chunk(prompts[2], 24, 25, blocks[2]))
    np.testing.assert_array_equal(rest, alone[[0, 2]])


def test_bits_do_not_depend_on_chunks(llama: FusedOnBlocks) -> None:
    prompt = tokens(100)
    whole = llama.logits(prompt)
    for cuts in ((50,), (1, 2, 3, 4), (13, 62, 99)):
        np.testing.assert_array_equal(llama.logits(prompt, cuts=cuts), whole)


def test_bits_do_not_depend_on_the_number_of_threads(llama: FusedOnBlocks, tmp_path: Path) -> None:
    single = make_llama(tmp_path / "llama", llama.model.kv_layout(BLOCK_SIZE).dtype, threads=1)
    for count in (1, 80):
        np.testing.assert_array_equal(single.logits(tokens(count)), llama.logits(tokens(count)))


def test_int8_is_close_to_fp32(llama: FusedOnBlocks, tmp_path: Path) -> None:
    config = tiny_config("llama", **KINDS[llama.model.kv_layout(BLOCK_SIZE).dtype])
    exact = FusedOnBlocks(make_fused(tmp_path / "llama", config))
    prompt = tokens(40)
    difference = np.abs(llama.logits(prompt) - exact.logits(prompt)).max()
    assert 1e-5 < difference < 0.05 * np.abs(exact.logits(prompt)).max()


@pytest.mark.real_model
def test_the_demo_model_in_fp32_equals_stock() -> None:
    resolved = resolve_model("demo")
    fused = FusedOnBlocks(load_fused(resolved, precision="fp32", threads=1))
    prompt = [504, 3575, 282, 4649, 314, 260, 3575, 335, 28] * 5
    expected = stock_logits(resolved.directory, prompt)
    np.testing.assert_allclose(fused.logits(prompt, cuts=(17,)), expected[-1], rtol=0, atol=TOLERANCE)
