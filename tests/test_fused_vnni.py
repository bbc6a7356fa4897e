"""Affine weights, and their linear with 8-bit integer dot products against NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import njit, types

from twinstage.models.fused.affine import GROUP, AffineWeights, pack_affine, unpack_affine
from twinstage.models.fused.embed_affine import embed_rows_affine
from twinstage.models.fused.linear_vnni import linear_vnni, scratch_bytes
from twinstage.models.fused.target import target
from twinstage.models.fused.tiles_vnni import PANEL

K = 3 * GROUP
OUTPUTS = 3 * PANEL + 5
ROWS = 301  # more than two blocks, with rows left over for tiles of every size
needs_integer_dot = pytest.mark.skipif(
    not target().integer_dot, reason="this CPU has neither AVX-512 VNNI nor AVX-VNNI"
)


@cache
def _compiled() -> Any:
    @njit(types.void(*[types.int64] * 13))
    def call(x, x_stride, rows, weight, scale, k, panels, y, y_stride, accumulate, scratch, thread, threads):  # type: ignore[no-untyped-def]
        linear_vnni(x, x_stride, rows, weight, scale, k, panels, y, y_stride, accumulate, scratch, thread, threads)

    return call


def _aligned_bytes(size: int) -> np.ndarray:
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def _linear(x: np.ndarray, packed: AffineWeights, *, threads: int = 1, added_to: float | None = None) -> np.ndarray:
    """`x` times the weights as `threads` threads compute it, one after the other."""
    stream = _aligned_bytes(packed.stream.nbytes)
    stream[:] = packed.stream.reshape(-1)
    unit, scratch = np.array([packed.unit], np.float32), _aligned_bytes(scratch_bytes(x.shape[1]))
    panels = len(packed.stream)
    y = np.full((len(x), panels * PANEL), np.nan if added_to is None else added_to, np.float32)
    for thread in range(threads):
        _compiled()(
            x.ctypes.data, x.shape[1], len(x), stream.ctypes.data, unit.ctypes.data, x.shape[1], panels,
            y.ctypes.data, y.shape[1], int(added_to is not None), scratch.ctypes.data, thread, threads,
        )  # fmt: skip
    return y


def _weight(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((OUTPUTS, K), dtype=np.float32) / 20


def _rows(num_rows: int) -> np.ndarray:
    random = np.random.default_rng(5)
    return random.standard_normal((num_rows, K), dtype=np.float32) * random.random((num_rows, K), dtype=np.float32) ** 4


def _quantized_rows(x: np.ndarray) -> np.ndarray:
    """What the kernel makes of its activations, in float64."""
    grouped = x.reshape(len(x), -1, GROUP)
    largest = np.abs(grouped).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(grouped * inverse) * (largest.astype(np.float64) / 127)).reshape(x.shape)


def test_weights_of_group_formats_are_kept() -> None:
    """4-bit weights with scale and minimum, and 8-bit weights with a scale, survive but for the rounding to float16."""
    random = np.random.default_rng(1)
    scale = (random.random((64, K // GROUP, 1)) / 100).astype(np.float16).astype(np.float32)
    minimum = (-random.random((64, K // GROUP, 1)) / 10).astype(np.float16).astype(np.float32)
    quantized = random.integers(0, 16, (64, K // GROUP, GROUP)).astype(np.float32)
    quantized[..., :2] = 0, 15  # the scale of such formats comes from the smallest and the largest weight
    four_bits = quantized * scale + minimum
    eight_bits = random.integers(-127, 128, (64, K // GROUP, GROUP)).astype(np.float32) * scale
    eight_bits[..., 0] = 127 * scale[..., 0]
    for weight, tolerance in ((four_bits, 0.13 * scale / 17), (eight_bits, 0.0)):
        found = unpack_affine(pack_affine(weight.reshape(64, K), panel=PANEL), panel=PANEL, outputs=64)
        assert (np.abs(found.reshape(weight.shape) - weight) <= tolerance).all()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_any_weights_are_within_half_a_step(size: float) -> None:
    weight = _weight() * np.float32(size)
    found = unpack_affine(pack_affine(weight, panel=PANEL), panel=PANEL, outputs=OUTPUTS)
    grouped = weight.reshape(OUTPUTS, -1, GROUP)
    step = (grouped.max(-1) - grouped.min(-1)) / 255
    assert (
        np.abs(found - weight).reshape(grouped.shape).max(-1) <= 0.65 * step
    ).all()  # scale and minimum are rounded too


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_affine(np.zeros((4, 40), np.float32), panel=PANEL)
    with pytest.raises(ValueError, match="finite"):
        pack_affine(np.full((4, GROUP), np.nan, np.float32), panel=PANEL)


@needs_integer_dot
def test_linear_is_the_product_of_what_was_quantized() -> None:
    x, packed = _rows(40), pack_affine(_weight(), panel=PANEL)
    x[7] = 0
    x[9, :GROUP] = 1e-35  # counts as zero; the rest of the row does not
    x[11, 4] = 3e4  # an outlier costs its group its precision, no other
    weight = unpack_affine(packed, panel=PANEL, outputs=OUTPUTS).astype(np.float64)
    expected = _quantized_rows(x) @ weight.T
    size = np.abs(_quantized_rows(x)).sum(1, keepdims=True) * np.abs(weight).max(1)
    found = _linear(x, packed)[:, :OUTPUTS]
    assert (np.abs(found - expected) <= 1e-6 * size).all()
    assert not found[7].any()
    np.testing.assert_allclose(_linear(x, packed, added_to=2.0)[:, :OUTPUTS], found + np.float32(2), rtol=0, atol=0)


@needs_integer_dot
def test_a_row_is_the_same_bits_wherever_it_is_computed() -> None:
    x, packed = _rows(ROWS), pack_affine(_weight(), panel=PANEL)
    whole = _linear(x, packed)
    for rows in (1, 2, 3, 5, 13, 47):
        np.testing.assert_array_equal(_linear(x[-rows:].copy(), packed), whole[-rows:])
    for threads in (2, 3, 4):
        np.testing.assert_array_equal(_linear(x, packed, threads=threads), whole)
        np.testing.assert_array_equal(_linear(x[:6].copy(), packed, threads=threads), whole[:6])


@needs_integer_dot
def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, packed = _rows(4), pack_affine(_weight(), panel=PANEL)
    clean = _linear(x, packed)
    x[1, 50], x[2, 3] = np.nan, np.inf
    found = _linear(x, packed)
    assert np.isnan(found[1:3, :OUTPUTS]).all()
    np.testing.assert_array_equal(found[[0, 3]], clean[[0, 3]])


def test_an_embedding_is_a_row_of_the_weights() -> None:
    packed, token_ids = pack_affine(_weight(), panel=PANEL), np.array([OUTPUTS - 1, 0, PANEL, 7], np.int32)
    unit, hidden = np.array([packed.unit], np.float32), np.zeros((4, K + 3), np.float32)

    @njit(types.void(*[types.int64] * 5))
    def embed(token_ids, table, unit, hidden, end):  # type: ignore[no-untyped-def]
        embed_rows_affine(token_ids, table, unit, K, hidden, K + 3, 1, end)

    embed(token_ids.ctypes.data, packed.stream.ctypes.data, unit.ctypes.data, hidden.ctypes.data, 4)
    expected = unpack_affine(packed, panel=PANEL, outputs=OUTPUTS)[token_ids]
    expected[0] = 0  # not asked for
    np.testing.assert_array_equal(hidden[:, :K], expected)
    assert not hidden[:, K:].any()
