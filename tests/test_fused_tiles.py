"""Register tiles against NumPy, and that a row's result is the same bits in every tile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest

from twinstage.models.fused.compile import emit_object
from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.tiles import PANEL, tile_code

K = 2 * GROUP + 20  # a last group that is not whole
SHAPES = ((1, 1), (1, 4), (2, 2), (6, 1))


@cache
def _tile(int8: bool) -> Callable[..., None]:
    """The compiled dispatcher of all tiles of a precision."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    code = emit_object(tile_code(int8=int8), optimize=True)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address = engine.get_function_address(f"twinstage_tile_{'i8' if int8 else 'f32'}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(address)


_engines: list[object] = []


def _aligned(values: np.ndarray) -> np.ndarray:
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    result = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    result[:] = values
    return result


class _Case:
    """Random inputs of 6 rows and 4 panels; the weights in both representations."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.x = random.standard_normal((6, K), dtype=np.float32)
        self.quantized = _aligned(random.integers(-127, 128, (4, K, PANEL)).astype(np.int8))
        self.scale = _aligned(random.random((4, -(-K // GROUP), PANEL), dtype=np.float32) / 100)
        self.weight = _aligned(self.quantized * np.repeat(self.scale, GROUP, axis=1)[:, :K])

    def run(self, rows: slice, panels: int, *, int8: bool, accumulate_on: np.ndarray | None = None) -> np.ndarray:
        x = np.ascontiguousarray(self.x[rows])
        y = np.full((len(x), panels * PANEL), np.nan, np.float32) if accumulate_on is None else accumulate_on.copy()
        weight = self.quantized if int8 else self.weight
        _tile(int8)(
            len(x), panels, x.ctypes.data, K, weight.ctypes.data, self.scale.ctypes.data, K, y.ctypes.data, y.shape[1],
            int(accumulate_on is not None),
        )  # fmt: skip
        return y

    def expected(self, rows: slice, panels: int) -> np.ndarray:
        weight = self.weight[:panels].transpose(1, 0, 2).reshape(K, -1)
        return self.x[rows].astype(np.float64) @ weight.astype(np.float64)


@pytest.fixture(scope="module")
def case() -> _Case:
    return _Case()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("rows", "panels"), SHAPES)
def test_a_tile_is_a_product_of_matrices(case: _Case, rows: int, panels: int, int8: bool) -> None:
    chosen = slice(0, rows)
    expected = case.expected(chosen, panels)
    np.testing.assert_allclose(case.run(chosen, panels, int8=int8), expected, rtol=0, atol=2e-5)
    before = np.ones_like(expected, dtype=np.float32)
    added = case.run(chosen, panels, int8=int8, accumulate_on=before)
    np.testing.assert_array_equal(added, before + case.run(chosen, panels, int8=int8))


def test_a_row_is_the_same_bits_in_every_tile(case: _Case) -> None:
    together = case.run(slice(0, 6), 1, int8=True)
    for row in range(6):
        for panels in (1, 4):
            alone = case.run(slice(row, row + 1), panels, int8=True)
            np.testing.assert_array_equal(alone[0, :PANEL], together[row])
    np.testing.assert_array_equal(case.run(slice(0, 6), 1, int8=False), together)
