"""What kernels do with vectors, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from twinstage.models.fused import vectors as v

LANES = v.LANES


def _each(operation: Any) -> Any:
    """`run(source, result)`: `operation(source address, result address)` for each vector of float32 in `source`."""

    @njit
    def run(source: Any, result: Any, width: Any) -> None:
        for index in range(0, source.size, LANES):
            operation(source.ctypes.data + 4 * index, result.ctypes.data + width * index)

    return lambda source, result: run(source, result, result.itemsize)


def _vectors(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    array = np.asarray(values, dtype=np.float32)
    return np.pad(array, (0, -array.size % v.LANES))


def test_powers_of_two() -> None:
    @njit
    def power(source: Any, result: Any) -> None:
        v.store(result, v.exp2(v.load(source)))

    x = _vectors(-np.concatenate([np.linspace(0, 126, 200_003), np.linspace(0, 2, 50_001)]))
    y = np.empty_like(x)
    _each(power)(x, y)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(y / exact - 1).max() < 1.0e-7
    edges = _vectors([0.0, -0.0, -1.0, -126.0, -126.5, -1000.0, -1e30, -np.inf])
    y = np.empty_like(edges)
    _each(power)(edges, y)
    assert y[:8].tolist() == [1.0, 1.0, 0.5, 2.0**-126, 0.0, 0.0, 0.0, 0.0]


def test_number_formats_are_those_of_torch() -> None:
    @njit
    def to_half(source: Any, result: Any) -> None:
        v.store_f16(result, v.load(source))

    @njit
    def to_bfloat(source: Any, result: Any) -> None:
        v.store_bf16(result, v.load(source))

    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    ties = (np.arange(4096, dtype=np.uint32) * 0x1000 + 0x3F800000).view(np.float32)
    x = _vectors(np.concatenate([bits[~np.isnan(bits)], ties, [np.inf, -np.inf, 65504, 65520, 1e-8, -0.0]]))
    for operation, kind in ((to_half, torch.float16), (to_bfloat, torch.bfloat16)):
        y = np.empty(x.size, dtype=np.uint16)
        _each(operation)(x, y)
        expected = torch.from_numpy(x).to(kind).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(y, expected)
    y = np.empty(v.LANES, dtype=np.uint16)
    _each(to_bfloat)(_vectors([np.nan, np.uint32(0x7F800001).view(np.float32)]), y)
    assert torch.from_numpy(y[:2].view(np.int16)).view(torch.bfloat16).isnan().all()


def test_reading_is_exact() -> None:
    @njit
    def from_half(source: Any, result: Any) -> None:
        v.store(result, v.load_f16(source))

    @njit
    def from_bfloat(source: Any, result: Any) -> None:
        v.store(result, v.load_bf16(source))

    @njit
    def run(source: Any, result: Any, half: Any) -> None:
        for index in range(0, source.size, LANES):
            if half:
                from_half(source.ctypes.data + 2 * index, result.ctypes.data + 4 * index)
            else:
                from_bfloat(source.ctypes.data + 2 * index, result.ctypes.data + 4 * index)

    every = np.arange(2**16, dtype=np.uint16)
    for half, kind in ((True, torch.float16), (False, torch.bfloat16)):
        y = np.empty(every.size, dtype=np.float32)
        run(every, y, half)
        expected = torch.from_numpy(every.view(np.int16)).view(kind).float().numpy()
        np.testing.assert_array_equal(y, expected)
