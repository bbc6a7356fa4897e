"""Attention kernels: against float64, and bit by bit against themselves whatever else is in the step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fused_attention_case
from fused_attention_case import Sequences, make_shape

pytestmark = pytest.mark.xdist_group("fused_attention")  # each process would compile the kernels again

BLOCK_SIZES = {"float32": 16, "float16": 5, "bfloat16": 32}
SHAPES = [
    {"dtype": "float32", "head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    {"dtype": "float16", "head_dim": 80, "num_heads": 2, "num_kv_heads": 2},
    {"dtype": "bfloat16", "head_dim": 128, "num_heads": 8, "num_kv_heads": 1},
]


@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=[str(shape["dtype"]) for shape in SHAPES])
def test_equals_the_definition(shape: dict[str, object], window: int) -> None:
    chunks = [  # tokens, context: around the borders of blocks, groups of rows and tiles of keys
        *[(1, 1), (1, 15), (1, 16), (1, 17), (1, 127), (1, 128), (1, 129), (1, 300)],
        *[(2, 2), (3, 130), (5, 5), (16, 16), (17, 140), (49, 49), (70, 256), (130, 390)],
    ]
    kernels = make_shape(**shape)  # type: ignore[arg-type]
    sequences = Sequences(kernels, [context for _, context in chunks], block_size=BLOCK_SIZES[kernels.dtype])
    results = sequences.attend(list(enumerate(chunks)), threads=2, window=window)
    for index, (chunk, result) in enumerate(zip(chunks, results, strict=True)):
        np.testing.assert_allclose(
            result, sequences.reference(index, chunk, window=window), atol=3e-6, rtol=0, err_msg=str(chunk)
        )


@pytest.mark.parametrize("window", [0, 100])
def test_a_rows_bits_depend_on_nothing_but_its_sequence(window: int) -> None:
    sequences = Sequences(make_shape(), [400, 300, 90])
    whole = sequences.attend([(0, (400, 400))], window=window)[0]
    others = [(1, (1, 300)), (2, (90, 90))]
    for cuts in ([400], [1, 127, 128, 144], [150, 3, 16, 17, 200, 13, 1], [128, 271, 1]):
        end = 0
        for length in cuts:
            end += length
            alone = sequences.attend([(0, (length, end))], window=window)[0]
            np.testing.assert_array_equal(alone, whole[end - length : end])
            together = sequences.attend([*others, (0, (length, end))], threads=2, window=window)[2]
            np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("batch", [1, 2, 12])
def test_a_split_context_gives_the_same_bits(batch: int) -> None:
    sequences = Sequences(make_shape(), [900] * batch)
    chunks = [(index, (1 + index % 2, 900 - index)) for index in range(batch)]
    whole = sequences.attend(chunks, threads=1)  # with one thread nothing is split
    for threads in (2, 3):
        for expected, actual in zip(whole, sequences.attend(chunks, threads=threads), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_narrow_vectors_give_the_same_bits(tmp_path: Path) -> None:
    """What a CPU without AVX-512 computes."""
    output = tmp_path / "narrow.npy"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
    command = [sys.executable, fused_attention_case.__file__, str(output)]
    subprocess.run(command, env=environment, check=True, timeout=400)
    np.testing.assert_array_equal(np.load(output), np.concatenate(fused_attention_case.vector_width_case()))
