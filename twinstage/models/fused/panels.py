"""Register tiles of attention: products of a few rows with a few vectors, and transposition, as LLVM IR.

Every output is one chain of fused multiply-adds that starts at zero and takes its terms in their order, whatever the
shape of the tile. So the score of a query and a key, and the weighted sum of values, come out the same bit by bit
whether the lanes of a vector are queries (prefill), keys or dimensions (decode).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types

from twinstage.models.fused.bfloat16 import emit_dot
from twinstage.models.fused.intrinsics import F32, I64, intrinsic
from twinstage.models.fused.vectors import (
    F32_VECTOR,
    I32_VECTOR,
    LANES,
    emit_fma,
    emit_load,
    emit_load_bf16,
    emit_load_f16,
    emit_splat,
    emit_store,
    floats,
)

_LOADERS: dict[str, Callable[[ir.IRBuilder, ir.Value], ir.Value]] = {
    "float32": lambda builder, address: emit_load(builder, address, F32_VECTOR),
    "float16": emit_load_f16,
    "bfloat16": emit_load_bf16,
}
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def make_product(*, rows: int, vectors: int, pairs: bool = False) -> Any:
    """An intrinsic `product(a, a_row, a_step, b, b_step, c, c_row, count)`; all int64, strides in bytes.

    `c[row][column] = sum over k < count of a[row, k] * b[k][column]` for `rows` rows and `vectors * LANES` columns of
    float32; a[row, k] lies at `a + row * a_row + k * a_step`. With `pairs`, each a and b is a pair of bfloat16 numbers
    (`bfloat16.py`), and so a term of the sum two of them.
    """
    name = f"twinstage_product_{rows}x{vectors}{'_pairs' if pairs else ''}"
    multiply_add = emit_dot if pairs else emit_fma_into

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        a, a_row, a_step, b, b_step, c, c_row, count = function.args
        row_offsets = [builder.mul(a_row, _i64(row)) for row in range(rows)]

        def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            here = builder.add(a, builder.mul(index, a_step))
            line = builder.add(b, builder.mul(index, b_step))
            columns = [_at(builder, line, F32_VECTOR, column) for column in range(vectors)]
            results = []
            for row in range(rows):
                value = emit_splat(builder, emit_load(builder, builder.add(here, row_offsets[row]), F32))
                totals = sums[row * vectors : (row + 1) * vectors]
                results += [
                    multiply_add(builder, total, value, column) for column, total in zip(columns, totals, strict=True)
                ]
            return results

        sums = emit_loop(builder, count, [floats(0.0)] * (rows * vectors), step)
        emit_store_rows(builder, sums, c, c_row, vectors)
        builder.ret_void()

    return make_intrinsic(name, 8, build)


def make_weighted_sum(*, rows: int, vectors: int, dtype: str) -> Any:
    """An intrinsic `weighted_sum(p, p_row, lines, line_offset, c, c_row, totals, totals_row, count)`; all int64,
    strides in bytes.

    `c[row] = sum over k < count of p[row, k] * line_k`, where line k is `vectors * LANES` numbers of `dtype` at the
    address `lines[k] + line_offset` (`lines`: the address of int64 addresses) and p is float32 with adjacent k. The
    sum of p over k goes to all lanes of the vector at `totals + row * totals_row`.
    """
    name = f"twinstage_weighted_sum_{rows}x{vectors}_{dtype}"
    load, width = _LOADERS[dtype], VALUE_BYTES[dtype] * LANES

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        p, p_row, lines, line_offset, c, c_row, totals, totals_row, count = function.args
        row_offsets = [builder.mul(p_row, _i64(row)) for row in range(rows)]

        def step(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            line = builder.add(emit_load(builder, builder.add(lines, builder.mul(index, _i64(8))), I64), line_offset)
            columns = [load(builder, builder.add(line, _i64(column * width))) for column in range(vectors)]
            here = builder.add(p, builder.mul(index, _i64(4)))
            weights = [
                emit_splat(builder, emit_load(builder, builder.add(here, offset), F32)) for offset in row_offsets
            ]
            sums = [
                emit_fma(builder, weight, column, total)
                for (weight, column), total in zip(product(weights, columns), carried[rows:], strict=True)
            ]
            return [builder.fadd(total, weight) for total, weight in zip(carried, weights, strict=False)] + sums

        results = emit_loop(builder, count, [floats(0.0)] * (rows * (1 + vectors)), step)
        for row in range(rows):
            emit_store(builder, builder.add(totals, builder.mul(totals_row, _i64(row))), results[row])
        emit_store_rows(builder, results[rows:], c, c_row, vectors)
        builder.ret_void()

    return make_intrinsic(name, 9, build)


def make_gather_transposed(*, dtype: str) -> Any:
    """An intrinsic `gather(lines, line_offset, out, out_row)`; all int64, strides in bytes.

    Loads `LANES` numbers of `dtype` at each of the `LANES` addresses `lines[i] + line_offset`, and stores them
    transposed as float32: number j of line i at `out + j * out_row + 4 * i`.
    """
    load = _LOADERS[dtype]

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        lines, line_offset, out, out_row = function.args
        loaded = []
        for line in range(LANES):
            address = emit_load(builder, builder.add(lines, _i64(8 * line)), I64)
            loaded.append(load(builder, builder.add(address, line_offset)))
        for index, value in enumerate(emit_transposed(builder, loaded)):
            emit_store(builder, builder.add(out, builder.mul(out_row, _i64(index))), value)
        builder.ret_void()

    return make_intrinsic(f"twinstage_gather_{dtype}", 4, build)


def make_scatter_transposed() -> Any:
    """The inverse for float32: an intrinsic `scatter(source, source_row, lines, line_offset)`."""

    def build(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        source, source_row, lines, line_offset = function.args
        loaded = [
            emit_load(builder, builder.add(source, builder.mul(source_row, _i64(index))), F32_VECTOR)
            for index in range(LANES)
        ]
        for line, value in enumerate(emit_transposed(builder, loaded)):
            address = emit_load(builder, builder.add(lines, _i64(8 * line)), I64)
            emit_store(builder, builder.add(address, line_offset), value)
        builder.ret_void()

    return make_intrinsic("twinstage_scatter", 4, build)


def emit_fma_into(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Total + a * b, rounded once."""
    return emit_fma(builder, a, b, total)


def emit_transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of `LANES` vectors transposed in log2(LANES) rounds, each swapping blocks of half the size."""
    size = LANES // 2
    while size:
        low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
        results = list(rows)
        for index in range(LANES):
            if not index & size:
                pair = rows[index], rows[index + size]
                results[index] = builder.shuffle_vector(*pair, ir.Constant(I32_VECTOR, low))
                results[index + size] = builder.shuffle_vector(*pair, ir.Constant(I32_VECTOR, high))
        rows, size = results, size // 2
    return rows


def make_intrinsic(name: str, arity: int, build: Callable[[ir.Function], None]) -> Any:
    """An intrinsic of `arity` int64 arguments that calls a function of its own, written once per module."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64] * arity), name)
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            build(function)
        builder.call(function, arguments)
        return context.get_dummy_value()

    typed = types.void(*[types.int64] * arity), generate
    of_arity: dict[int, Callable[..., Any]] = {
        4: lambda context, a, b, c, d: typed,
        8: lambda context, a, b, c, d, e, f, g, h: typed,
        9: lambda context, a, b, c, d, e, f, g, h, i: typed,
    }
    return intrinsic(of_arity[arity])


def emit_loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    carried: list[ir.Value],
    step: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """Run `step(index, carried) -> carried` for index 0 .. count - 1, at least once, with `carried` in registers."""
    before = builder.block
    body, after = builder.append_basic_block(), builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    phis = [builder.phi(value.type) for value in carried]
    results = step(index, list(phis))
    following = builder.add(index, _i64(1))
    for phi, start, end in zip((index, *phis), (_i64(0), *carried), (following, *results), strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    return results


def emit_store_rows(builder: ir.IRBuilder, values: list[ir.Value], c: ir.Value, c_row: ir.Value, vectors: int) -> None:
    for index, value in enumerate(values):
        row, column = divmod(index, vectors)
        emit_store(builder, builder.add(builder.add(c, builder.mul(c_row, _i64(row))), _i64(column * 4 * LANES)), value)


def _at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, index: int) -> ir.Value:
    return emit_load(builder, builder.add(address, _i64(index * 4 * LANES)), kind)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)
