"""What kernels reach memory with: addresses are plain int64, so a kernel needs no array, no allocation, no runtime.

Indices count elements from the address. Vectors are `LANES` wide and live only inside the tiles (`tiles.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twinstage.models.fused.target import target

LANES = target().lanes

_njit: Any = numba.njit  # its annotations leave out the options that go to the target

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)

_Codegen = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def kernel(function: Callable[..., Any]) -> Any:
    """A function of the compiled step: int64 and float arguments, no exceptions, no runtime of Numba."""
    return _njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def pointer(builder: ir.IRBuilder, address: ir.Value, element: ir.Type, index: ir.Value | None = None) -> ir.Value:
    """The address of element `index` of an array of `element`s that starts at an int64 address."""
    base = builder.inttoptr(address, element.as_pointer())
    return base if index is None else builder.gep(base, [index])


def _loader(element: ir.Type, result: types.Type) -> Callable[..., Any]:
    def load(typing_context: Any, address: Any, index: Any) -> tuple[Any, _Codegen]:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            return builder.load(pointer(builder, arguments[0], element, arguments[1]))

        return result(types.int64, types.int64), generate

    return load


def _storer(element: ir.Type, accepted: types.Type) -> Callable[..., Any]:
    def store(typing_context: Any, address: Any, index: Any, value: Any) -> tuple[Any, _Codegen]:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            builder.store(arguments[2], pointer(builder, arguments[0], element, arguments[1]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, accepted), generate

    return store


load_f32 = intrinsic(_loader(F32, types.float32))
load_i32 = intrinsic(_loader(I32, types.int32))
load_i64 = intrinsic(_loader(I64, types.int64))
store_f32 = intrinsic(_storer(F32, types.float32))
store_i64 = intrinsic(_storer(I64, types.int64))
