"""Register tiles of decoding that multiply bfloat16 numbers; what `panels.py` says of the sums is true of these.

A term of a sum is the product of two pairs of numbers (`bfloat16.py`): of neighbouring dimensions for scores, of
neighbouring keys for weighted values.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir

from twinstage.models.fused.bfloat16 import ONES, emit_dot, emit_pairs_of_lines
from twinstage.models.fused.intrinsics import F32, I64
from twinstage.models.fused.panels import emit_loop, emit_store_rows, emit_transposed, make_intrinsic
from twinstage.models.fused.vectors import I32_VECTOR, LANES, emit_load, emit_splat, emit_store, floats


def make_weighted_sum_of_pairs(*, rows: int, vectors: int) -> Any:
    """As `panels.make_weighted_sum` for bfloat16, but `p` has bfloat16 numbers too, and `count` is the number of pairs.

    There must be an even number of lines, and a weight of 0 for one that only fills a pair.
    """

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        p, p_row, lines, line_offset, c, c_row, totals, totals_row, count = function.args
        row_offsets = [builder.mul(p_row, _i64(row)) for row in range(rows)]

        def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            pair = builder.add(lines, builder.mul(index, _i64(16)))
            first, second = (
                builder.add(emit_load(builder, builder.add(pair, _i64(place)), I64), line_offset) for place in (0, 8)
            )
            columns = [
                emit_pairs_of_lines(builder, builder.add(first, offset), builder.add(second, offset))
                for offset in (_i64(2 * LANES * column) for column in range(vectors))
            ]
            here = builder.add(p, builder.mul(index, _i64(4)))
            weights = [
                emit_splat(builder, emit_load(builder, builder.add(here, offset), F32)) for offset in row_offsets
            ]
            sums = [
                emit_dot(builder, total, weight, column)
                for (weight, column), total in zip(product(weights, columns), carried[rows:], strict=True)
            ]
            ones = floats(ONES)
            return [
                emit_dot(builder, total, weight, ones) for total, weight in zip(carried, weights, strict=False)
            ] + sums

        results = emit_loop(builder, count, [floats(0.0)] * (rows * (1 + vectors)), step)
        for row in range(rows):
            emit_store(builder, builder.add(totals, builder.mul(totals_row, _i64(row))), results[row])
        emit_store_rows(builder, results[rows:], c, c_row, vectors)
        builder.ret_void()

    return make_intrinsic(f"twinstage_weighted_sum_of_pairs_{rows}x{vectors}", 9, build)


def make_gather_pairs_transposed(*, pairs: int) -> Any:
    """An intrinsic `gather(lines, line_offset, out, out_row)`; all int64, strides in bytes.

    Loads `pairs` pairs of bfloat16 numbers, `LANES` or half of them, at each of the `LANES` addresses
    `lines[i] + line_offset`, and stores them transposed: pair j of line i at `out + j * out_row + 4 * i`.
    """
    kind = ir.VectorType(F32, pairs)
    widened = ir.Constant(I32_VECTOR, [min(lane, pairs) for lane in range(LANES)])

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        lines, line_offset, out, out_row = function.args
        loaded = []
        for line in range(LANES):
            address = emit_load(builder, builder.add(lines, _i64(8 * line)), I64)
            value = emit_load(builder, builder.add(address, line_offset), kind)
            if pairs < LANES:
                value = builder.shuffle_vector(value, ir.Constant(kind, None), widened)
            loaded.append(value)
        for index, value in enumerate(emit_transposed(builder, loaded)[:pairs]):
            emit_store(builder, builder.add(out, builder.mul(out_row, _i64(index))), value)
        builder.ret_void()

    return make_intrinsic(f"twinstage_gather_pairs_{pairs}", 4, build)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)
