"""Vectors of pairs of bfloat16 numbers, for the instruction that multiplies and adds them (`vdpbf16ps`, AVX512_BF16).

A vector of pairs is a float32 vector by type, each lane of which holds the first number of a pair in its lower half
and the second in its upper half. For every lane, `dot(total, a, b)` is two fused multiply-adds in float32, the second
numbers first: `fma(a[0], b[0], fma(a[1], b[1], total))`; what is below the normal numbers counts as zero.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from twinstage.models.fused.intrinsics import I32
from twinstage.models.fused.vectors import (
    F32_VECTOR,
    I16_VECTOR,
    I32_VECTOR,
    LANES,
    emit_fma,
    emit_load,
    emit_round_bf16,
    emit_store,
    floats,
    ints,
    operation,
    vector,
)

_I64 = types.int64
_UPPER = 0xFFFF0000


class _BFloat16(ir.Type):  # type: ignore[misc]
    """The scalar type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)

# (2^r - 1) / r for 0 <= r < 1, so that the largest error of 2^r is smallest: 9e-5 of it, a twentieth of what rounding
# to bfloat16 costs (tests/test_fused_bfloat16.py).
WEIGHT_COEFFICIENTS = (0.69511583, 0.22764925, 0.07706314)
ONES = float.fromhex("0x1.007fp+0")  # as float32, a pair of 1
_HALF_UNIT = 2.0**-8  # of a bfloat16 number in [1, 2): with it, dropping the lower half rounds


def emit_dot(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """See the module."""
    kind = ir.FunctionType(F32_VECTOR, [F32_VECTOR, _PAIRS, _PAIRS])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def emit_pairs_of_lines(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    """Pair up the `LANES` numbers at two addresses."""
    lower, upper = (builder.zext(emit_load(builder, address, I16_VECTOR), I32_VECTOR) for address in (first, second))
    return builder.bitcast(builder.or_(lower, builder.shl(upper, ints(16))), F32_VECTOR)


def _emit_copy(builder: ir.IRBuilder, source: ir.Value, target: ir.Value) -> None:
    emit_store(builder, target, emit_load(builder, source, I16_VECTOR))


def _emit_join(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    lower = builder.lshr(builder.bitcast(first, I32_VECTOR), ints(16))
    upper = builder.and_(builder.bitcast(second, I32_VECTOR), ints(_UPPER))
    return builder.bitcast(builder.or_(lower, upper), F32_VECTOR)


def _emit_weight(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    rest = _masked_call(builder, "reduce", x, ir.Constant(I32, 1))  # x - floor(x); 0 for -inf
    sums = floats(WEIGHT_COEFFICIENTS[-1])
    for coefficient in (*WEIGHT_COEFFICIENTS[-2::-1], 1.0 + _HALF_UNIT):
        sums = emit_fma(builder, sums, rest, floats(coefficient))
    return _masked_call(builder, "scalef", sums, x)  # sums * 2^floor(x)


def _masked_call(builder: ir.IRBuilder, operation_name: str, x: ir.Value, second: ir.Value) -> ir.Value:
    mask = ir.IntType(LANES)
    kind = ir.FunctionType(F32_VECTOR, [F32_VECTOR, second.type, F32_VECTOR, mask, I32])
    name = f"llvm.x86.avx512.mask.{operation_name}.ps.{32 * LANES}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    current_rounding = ir.Constant(I32, 4)
    return builder.call(function, [x, second, floats(0.0), ir.Constant(mask, -1), current_rounding])


def _emit_store_upper(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    upper = builder.lshr(builder.bitcast(value, I32_VECTOR), ints(16))
    emit_store(builder, address, builder.trunc(upper, I16_VECTOR))


dot = operation(emit_dot, vector, vector, vector, vector)
pairs_of_lines = operation(emit_pairs_of_lines, vector, _I64, _I64)
copy_line = operation(_emit_copy, types.void, _I64, _I64)  # `LANES` numbers from one address to another
join = operation(_emit_join, vector, vector, vector)  # pairs of the upper halves of the lanes
rounded = operation(lambda b, x: b.bitcast(emit_round_bf16(b, x), F32_VECTOR), vector, vector)  # in the upper halves
store_upper = operation(_emit_store_upper, types.void, _I64, vector)  # the upper halves of the lanes
# 2^x for x <= 0, as bfloat16 in the upper halves of the lanes; the lower halves have no meaning. 0 for -inf.
weight: Any = operation(_emit_weight, vector, vector)
