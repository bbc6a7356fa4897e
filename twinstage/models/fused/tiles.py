"""Register tiles: `rows` x (`panels` * PANEL) outputs accumulated in vector registers over all of k.

Each output is one chain of fused multiply-adds over k = 0, 1, 2, ... that starts at zero, whatever the tile, so a row's
result depends neither on how many rows are computed together nor on its place among them. Int8 weights become
`float(q) * scale` in the registers, rounded once, which is also what `expand_panel` writes.

Weights lie in panels: `[num_panels][k][PANEL]`; scales `[num_panels][ceil(k / GROUP)][PANEL]`. k is a multiple of
`UNROLL`. The tiles are written as LLVM IR because Numba has no vector types.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twinstage.models.fused.intrinsics import F32, I8, I32, I64, LANES

GROUP = 64  # weights of one output that share a scale
UNROLL = 4  # steps of k in one pass of the innermost loop
PANEL = 2 * LANES

VECTOR = ir.VectorType(F32, LANES)
_BYTES = ir.VectorType(I8, LANES)
_INTS = ir.VectorType(I32, LANES)


def make_tile(*, rows: int, panels: int, int8: bool) -> Any:
    """An intrinsic `tile(x, x_stride, weight, scale, k, y, y_stride, accumulate)`; all int64, strides in elements.

    Computes `y[row, column] = sum over k of x[row, k] * weight[k, column]`, or adds that when `accumulate` is 1.
    """

    def tile(
        typing_context: Any,
        x: Any,
        x_stride: Any,
        weight: Any,
        scale: Any,
        k: Any,
        y: Any,
        y_stride: Any,
        accumulate: Any,
    ) -> tuple[Any, Any]:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            function = _tile_function(builder.module, rows=rows, panels=panels, int8=int8)
            builder.call(function, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return intrinsic(tile)


def _tile_function(module: ir.Module, *, rows: int, panels: int, int8: bool) -> ir.Function:
    name = f"twinstage_tile_{rows}x{panels}_{'i8' if int8 else 'f32'}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    _TileBuilder(function, rows=rows, panels=panels, int8=int8).build()
    return function


class _TileBuilder:
    """Writes the body of one tile function."""

    def __init__(self, function: ir.Function, *, rows: int, panels: int, int8: bool) -> None:
        self._function = function
        self._rows = rows
        self._columns = [(panel, half) for panel in range(panels) for half in (0, 1)]
        self._int8 = int8
        self._b = ir.IRBuilder(function.append_basic_block("entry"))
        self._x, self._x_stride, self._weight, self._scale, self._k, self._y, self._y_stride, self._accumulate = (
            function.args
        )
        fma_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
        self._fma = function.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), fma_type)

    def build(self) -> None:
        b = self._b
        size = 1 if self._int8 else 4
        self._panel_bytes = b.mul(self._k, _i64(PANEL * size))
        groups = b.sdiv(b.add(self._k, _i64(GROUP - 1)), _i64(GROUP))
        self._scale_bytes = b.mul(groups, _i64(PANEL * 4))
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        sums = [zero] * (self._rows * len(self._columns))
        sums = self._over_groups(groups, sums) if self._int8 else self._over_k(_i64(0), self._k, sums, scales=[])
        self._write(sums)
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

    def _over_groups(self, groups: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        def body(group: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            b = self._b
            start = b.mul(group, _i64(GROUP))
            end = b.add(start, _i64(GROUP))
            stop = b.select(b.icmp_signed("<", end, self._k), end, self._k)
            scales = []
            for panel, half in self._columns:
                offset = b.add(
                    b.mul(self._scale_bytes, _i64(panel)),
                    b.mul(b.add(b.mul(group, _i64(2)), _i64(half)), _i64(LANES * 4)),
                )
                scales.append(self._load(b.add(self._scale, offset), VECTOR))
            return self._over_k(start, stop, carried, scales=scales)

        return self._loop(_i64(0), groups, 1, sums, body)

    def _over_k(
        self, start: ir.Value, stop: ir.Value, sums: list[ir.Value], *, scales: list[ir.Value]
    ) -> list[ir.Value]:
        def body(k: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            sums = list(carried)
            for step in range(UNROLL):
                self._one_k(self._b.add(k, _i64(step)), sums, scales)
            return sums

        return self._loop(start, stop, UNROLL, sums, body)

    def _one_k(self, k: ir.Value, sums: list[ir.Value], scales: list[ir.Value]) -> None:
        b = self._b
        weights = [self._load_weight(k, panel, half) for panel, half in self._columns]
        if scales:
            weights = [b.fmul(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
        for row in range(self._rows):
            base = b.inttoptr(b.add(self._x, b.mul(b.mul(self._x_stride, _i64(row)), _i64(4))), F32.as_pointer())
            value = self._broadcast(b.load(b.gep(base, [k])))
            for column, weight in enumerate(weights):
                index = row * len(weights) + column
                sums[index] = b.call(self._fma, [value, weight, sums[index]])

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

    def _write(self, sums: list[ir.Value]) -> None:
        b = self._b
        adds = b.icmp_signed("!=", self._accumulate, _i64(0))
        plain, adding, done = (self._function.append_basic_block(name) for name in ("plain", "adding", "done"))
        b.cbranch(adds, adding, plain)
        for block, add in ((plain, False), (adding, True)):
            b.position_at_end(block)
            for index, total in enumerate(sums):
                row, (panel, half) = index // len(self._columns), self._columns[index % len(self._columns)]
                place = b.add(b.mul(self._y_stride, _i64(row)), _i64(panel * PANEL + half * LANES))
                target = b.inttoptr(b.add(self._y, b.mul(place, _i64(4))), VECTOR.as_pointer())
                if add:
                    old = b.load(target)
                    old.align = 4
                    total = b.fadd(old, total)
                b.store(total, target).align = 4
            b.branch(done)
        b.position_at_end(done)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)
