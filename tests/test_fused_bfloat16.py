"""Attention that multiplies pairs of bfloat16 numbers: the instruction, the weights, and what rounding may cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from fused_attention_case import Sequences, make_shape, pack, unpack
from twinstage.models.fused import bfloat16 as b
from twinstage.models.fused import vectors as v
from twinstage.models.fused.attention import LOG2_E
from twinstage.models.fused.target import target

pytestmark = [
    pytest.mark.xdist_group("fused_attention"),
    pytest.mark.skipif(not target().bfloat16_dot, reason="this CPU lacks AVX512_BF16"),
]
_UNIT = 2.0**-8  # the largest relative error of rounding to bfloat16
_WEIGHT_ERROR = _UNIT + 1e-4
SHAPES = [
    {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    {"head_dim": 80, "num_heads": 2, "num_kv_heads": 2},  # no whole number of vectors of pairs
    {"head_dim": 128, "num_heads": 8, "num_kv_heads": 1},
]


def test_a_term_is_two_fused_operations() -> None:
    @njit
    def run(total: Any, first: Any, second: Any) -> None:
        for index in range(0, total.size, v.LANES):
            own, place = total.ctypes.data + 4 * index, 4 * index
            v.store(own, b.dot(v.load(own), v.load(first.ctypes.data + place), v.load(second.ctypes.data + place)))

    random = np.random.default_rng(0)
    before = (random.standard_normal(8000) * 10.0 ** random.integers(-3, 3, 8000)).astype(np.float32)
    pairs = [pack(random.standard_normal(16000), "bfloat16") for _ in range(2)]
    found = before.copy()
    run(found, *(pair.view(np.float32) for pair in pairs))
    x, y = (unpack(pair).astype(np.longdouble).reshape(-1, 2) for pair in pairs)
    expected = before
    for number in (1, 0):
        expected = (x[:, number] * y[:, number] + expected).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


def test_weights_are_powers_of_two_in_bfloat16() -> None:
    @njit
    def run(x: Any, y: Any) -> None:
        for index in range(0, x.size, v.LANES):
            b.store_upper(y.ctypes.data + 2 * index, b.weight(v.load(x.ctypes.data + 4 * index)))

    edges = [0.0, -0.0, -1.0, -20.0, -1000.0, -1e30, -np.inf, -np.inf]
    x = np.concatenate([edges, -np.linspace(0, 100, 160_000)]).astype(np.float32)
    x = x[: x.size // v.LANES * v.LANES]
    y = np.zeros(x.size, np.uint16)
    run(x, y)
    found = unpack(y)
    assert found[:8].tolist() == [1.0, 1.0, 0.5, 2.0**-20, 0.0, 0.0, 0.0, 0.0]
    assert np.abs(found[8:] / np.exp2(x[8:].astype(np.float64)) - 1).max() < _WEIGHT_ERROR


def _round_queries(sequences: Sequences, queries: int) -> None:
    """Make the queries such that scaling and rounding them, as the kernels do, is exact."""
    scale = np.float32(sequences.shape.head_dim**-0.5 * LOG2_E)
    for query in sequences.queries:
        rounded = unpack(pack(query[:, :queries] * scale, "bfloat16"))
        query[:, :queries] = rounded / scale
        assert (unpack(pack(query[:, :queries] * scale, "bfloat16")) == rounded).all()


def _mean_magnitudes(sequences: Sequences, index: int, chunk: tuple[int, int], window: int) -> npt.NDArray[np.float64]:
    """What a row would attend to if all values were positive: errors of weights are relative to it."""
    signed = sequences.kv.copy()
    sequences.kv[:, :, 1] &= 0x7FFF
    magnitudes = sequences.reference(index, chunk, window=window)
    sequences.kv[:] = signed
    return magnitudes


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=[str(shape["head_dim"]) for shape in SHAPES])
def test_only_weights_are_rounded_further(shape: dict[str, int], window: int) -> None:
    chunks = [(1, 1), (1, 16), (1, 129), (1, 300), (2, 2), (5, 5), (3, 130), (17, 140), (49, 49), (70, 256), (130, 390)]
    kernels = make_shape(dtype="bfloat16", bfloat16_dot=True, **shape)
    sequences = Sequences(kernels, [context for _, context in chunks], block_size=7)
    _round_queries(sequences, shape["num_heads"] * shape["head_dim"])
    results = sequences.attend(list(enumerate(chunks)), threads=2, window=window)
    largest = 0.0
    for index, (chunk, result) in enumerate(zip(chunks, results, strict=True)):
        error = np.abs(result - sequences.reference(index, chunk, window=window))
        limit = 2 * _WEIGHT_ERROR * _mean_magnitudes(sequences, index, chunk, window) + 1e-5
        assert (error <= limit).all(), chunk
        largest = max(largest, float(error.max()))
    assert largest > 1e-3  # float32 would be closer


def test_a_rows_bits_depend_on_nothing_but_its_sequence() -> None:
    """Prefill and decoding, alone and in a batch, split between threads or not: the same bits."""
    for shape in SHAPES:
        sequences = Sequences(make_shape(dtype="bfloat16", bfloat16_dot=True, **shape), [400, 300, 90])
        whole = sequences.attend([(0, (400, 400))])[0]
        for cuts in ([1, 127, 128, 144], [150, 3, 16, 17, 200, 13, 1], [128, 271, 1]):
            end = 0
            for length in cuts:
                end += length
                chunks = [(1, (1, 300)), (2, (90, 90)), (0, (length, end))]
                for threads, step in ((1, chunks[2:]), (2, chunks)):
                    found = sequences.attend(step, threads=threads)[-1]
                    np.testing.assert_array_equal(found, whole[end - length : end])
