"""Register tiles: `rows` x (`panels` * PANEL) outputs accumulated in vector registers over all of k.

Each output is one chain of fused multiply-adds over k = 0, 1, 2, ... that starts at zero, whatever the tile, so a row's
result depends neither on how many rows are computed together nor on its place among them. Int8 weights become
`float(q) * scale` in the registers, rounded once, which is also what `expand_panel` writes.

Weights lie in panels: `[num_panels][k][PANEL]`; scales `[num_panels][ceil(k / GROUP)][PANEL]`. k is a multiple of
`UNROLL`. The tiles are written as LLVM IR because Numba has no vector types, and apart from what Numba compiles because
it would optimize them again in every function that calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.target import target

UNROLL = 4  # steps of k in one pass of the innermost loop
LANES = target().lanes
PANEL = target().panel
TILE_ROWS = target().tile_rows
# (rows at most, panels): the register file holds rows * panels * 2 sums beside the weights.
_PANELS_OF_ROWS = ((2, 4), (6, 2), (12, 1)) if LANES == 16 else ((1, 4), (3, 2), (6, 1))

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, LANES)
_INTS = ir.VectorType(I32, LANES)

_OneK = Callable[[ir.Value, list[ir.Value], list[ir.Value]], list[ir.Value]]  # (k, sums, scales) -> sums


def tile_panels(rows: int) -> int:
    """Panels that a tile of `rows` rows computes together: enough sums to hide the latency of an addition."""
    return next(panels for limit, panels in _PANELS_OF_ROWS if rows <= limit)


def tile_code(*, int8: bool) -> str:
    """LLVM IR that defines what a precision computes with, all `void` functions of int64 arguments.

    `twinstage_tile_f32` and, for int8, `twinstage_tile_i8(rows, panels, x, x_stride, weight, scale, k, y, y_stride,
    accumulate)`: `y[row, column] = sum over k of x[row, k] * weight[k, column]`, or adds that when `accumulate` is 1;
    strides are in elements, `rows` at most TILE_ROWS, `panels` 1, 2 or 4 and at most `tile_panels(rows)`, for float32
    tiles of int8 weights always 1. `twinstage_expand_panel(weight, scale, k, expanded)` writes the float32 weights
    `[k][PANEL]` of one int8 panel.
    """
    module = ir.Module("twinstage_tiles")
    _dispatch_function(module, int8=False, most_panels=1 if int8 else 4)
    if int8:
        _dispatch_function(module, int8=True, most_panels=4)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), "twinstage_expand_panel")
        weight, scale, k, expanded = function.args
        _TileBuilder(function, weight, scale, k, rows=0, panels=1, int8=True).build_expansion(expanded)
    return str(module)


def _dispatch_function(module: ir.Module, *, int8: bool, most_panels: int) -> None:
    """Calls the tile of `rows` and `panels`, its first two arguments, with the others."""
    name = f"twinstage_tile_{'i8' if int8 else 'f32'}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 10), name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    rows, panels, *others = function.args
    unknown = function.append_basic_block("unknown")
    switch = builder.switch(builder.add(builder.mul(rows, _i64(8)), panels), unknown)
    for row_count in range(1, TILE_ROWS + 1):
        for panel_count in (count for count in (1, 2, 4) if count <= min(most_panels, tile_panels(row_count))):
            block = function.append_basic_block(f"tile_{row_count}x{panel_count}")
            switch.add_case(_i64(row_count * 8 + panel_count), block)
            builder.position_at_end(block)
            builder.call(_tile_function(module, rows=row_count, panels=panel_count, int8=int8), others)
            builder.ret_void()
    builder.position_at_end(unknown)
    builder.unreachable()


def _tile_function(module: ir.Module, *, rows: int, panels: int, int8: bool) -> ir.Function:
    name = f"twinstage_tile_{rows}x{panels}_{'i8' if int8 else 'f32'}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    x, x_stride, weight, scale, k, y, y_stride, accumulate = function.args
    builder = _TileBuilder(function, weight, scale, k, rows=rows, panels=panels, int8=int8)
    builder.build(x, x_stride, y, y_stride, accumulate)
    return function


class _TileBuilder:
    """Writes the body of one tile function."""

    def __init__(
        self,
        function: ir.Function,
        weight: ir.Value,
        scale: ir.Value,
        k: ir.Value,
        *,
        rows: int,
        panels: int,
        int8: bool,
    ) -> None:
        self._function = function
        self._weight, self._scale, self._k = weight, scale, k
        self._rows = rows
        self._columns = [(panel, half) for panel in range(panels) for half in (0, 1)]
        self._int8 = int8
        self._b = b = ir.IRBuilder(function.append_basic_block("entry"))
        fma_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
        self._fma = function.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), fma_type)
        self._panel_bytes = b.mul(k, _i64(PANEL * (1 if int8 else 4)))
        self._groups = b.sdiv(b.add(k, _i64(GROUP - 1)), _i64(GROUP))
        self._scale_bytes = b.mul(self._groups, _i64(PANEL * 4))

    def build(self, x: ir.Value, x_stride: ir.Value, y: ir.Value, y_stride: ir.Value, accumulate: ir.Value) -> None:
        """Sum over k in registers, then write."""

        def one_k(k: ir.Value, sums: list[ir.Value], scales: list[ir.Value]) -> list[ir.Value]:
            return self._one_k(k, sums, scales, x=x, x_stride=x_stride)

        sums = [ir.Constant(VECTOR, [0.0] * LANES)] * (self._rows * len(self._columns))
        sums = self._over_groups(sums, one_k) if self._int8 else self._over_k(_i64(0), self._k, sums, [], one_k)
        self._write(sums, y, y_stride, accumulate)
        self._b.ret_void()

    def build_expansion(self, expanded: ir.Value) -> None:
        """Write each weight as float32."""

        def one_k(k: ir.Value, sums: list[ir.Value], scales: list[ir.Value]) -> list[ir.Value]:
            b = self._b
            for (panel, half), scale in zip(self._columns, scales, strict=True):
                place = b.add(b.mul(k, _i64(PANEL)), _i64(half * LANES))
                address = b.inttoptr(b.add(expanded, b.mul(place, _i64(4))), VECTOR.as_pointer())
                b.store(b.fmul(self._load_weight(k, panel, half), scale), address).align = 4 * LANES
            return sums

        self._over_groups([], one_k)
        self._b.ret_void()

    def _loop(self, start: ir.Value, stop: ir.Value, step: int, carried: list[ir.Value], body: Any) -> list[ir.Value]:
        """A loop that carries vectors in registers: `body(index, carried) -> carried`. Runs at least once."""
        before = self._b.block
        block = self._function.append_basic_block("loop")
        after = self._function.append_basic_block("after")
        self._b.branch(block)
        self._b.position_at_end(block)
        index = self._b.phi(I64)
        index.add_incoming(start, before)
        phis = []
        for value in carried:
            phi = self._b.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        results = body(index, phis)
        following = self._b.add(index, _i64(step))
        index.add_incoming(following, self._b.block)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, self._b.block)
        self._b.cbranch(self._b.icmp_signed("<", following, stop), block, after)
        self._b.position_at_end(after)
        return list(results)

    def _over_groups(self, sums: list[ir.Value], one_k: _OneK) -> list[ir.Value]:
        def body(group: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            b = self._b
            start = b.mul(group, _i64(GROUP))
            end = b.add(start, _i64(GROUP))
            stop = b.select(b.icmp_signed("<", end, self._k), end, self._k)
            scales = []
            for panel, half in self._columns:
                place = b.add(b.mul(group, _i64(PANEL * 4)), _i64(half * LANES * 4))
                offset = b.add(b.mul(self._scale_bytes, _i64(panel)), place)
                scales.append(self._load(b.add(self._scale, offset), VECTOR))
            return self._over_k(start, stop, carried, scales, one_k)

        return self._loop(_i64(0), self._groups, 1, sums, body)

    def _over_k(
        self, start: ir.Value, stop: ir.Value, sums: list[ir.Value], scales: list[ir.Value], one_k: _OneK
    ) -> list[ir.Value]:
        def body(k: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            sums = carried
            for step in range(UNROLL):
                sums = one_k(self._b.add(k, _i64(step)), sums, scales)
            return sums

        return self._loop(start, stop, UNROLL, sums, body)

    def _one_k(
        self, k: ir.Value, sums: list[ir.Value], scales: list[ir.Value], *, x: ir.Value, x_stride: ir.Value
    ) -> list[ir.Value]:
        b = self._b
        weights = [self._load_weight(k, panel, half) for panel, half in self._columns]
        if scales:
            weights = [b.fmul(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
        results = []
        for row in range(self._rows):
            base = b.inttoptr(b.add(x, b.mul(b.mul(x_stride, _i64(row)), _i64(4))), F32.as_pointer())
            value = self._broadcast(b.load(b.gep(base, [k])))
            for column, weight in enumerate(weights):
                results.append(b.call(self._fma, [value, weight, sums[row * len(weights) + column]]))
        return results

    def _load_weight(self, k: ir.Value, panel: int, half: int) -> ir.Value:
        b = self._b
        size = 1 if self._int8 else 4
        base = b.add(self._weight, b.mul(self._panel_bytes, _i64(panel)))
        address = b.add(b.add(base, b.mul(k, _i64(PANEL * size))), _i64(half * LANES * size))
        if not self._int8:
            return self._load(address, VECTOR)
        return b.sitofp(b.sext(self._load(address, _BYTES), _INTS), VECTOR)

    def _load(self, address: ir.Value, kind: ir.Type) -> ir.Value:
        loaded = self._b.load(self._b.inttoptr(address, kind.as_pointer()))
        loaded.align = LANES if kind is _BYTES else 4 * LANES
        return loaded

    def _broadcast(self, value: ir.Value) -> ir.Value:
        b = self._b
        single = b.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return b.shuffle_vector(single, ir.Constant(VECTOR, ir.Undefined), mask)

    def _write(self, sums: list[ir.Value], y: ir.Value, y_stride: ir.Value, accumulate: ir.Value) -> None:
        b = self._b
        adds = b.icmp_signed("!=", accumulate, _i64(0))
        plain, adding, done = (self._function.append_basic_block(name) for name in ("plain", "adding", "done"))
        b.cbranch(adds, adding, plain)
        for block, add in ((plain, False), (adding, True)):
            b.position_at_end(block)
            for index, total in enumerate(sums):
                row, (panel, half) = index // len(self._columns), self._columns[index % len(self._columns)]
                place = b.add(b.mul(y_stride, _i64(row)), _i64(panel * PANEL + half * LANES))
                target = b.inttoptr(b.add(y, b.mul(place, _i64(4))), VECTOR.as_pointer())
                if add:
                    old = b.load(target)
                    old.align = 4
                    total = b.fadd(old, total)
                b.store(total, target).align = 4
            b.branch(done)
        b.position_at_end(done)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)
