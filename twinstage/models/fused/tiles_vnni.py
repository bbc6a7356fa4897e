"""Register tiles of 8-bit integer dot products: affine weights (`affine.py`) times activations quantized by rows.

An activation row is int8 with one scale per GROUP consecutive values (largest magnitude / 127). For each group, the dot
product of bytes is an exact int32 (`vpdpbusd`: four products a lane and instruction), and the output's one chain of
floating-point operations is, over the groups in order,

    sum = fma(minimum, activation_scale * sum of activations, sum)
    sum = fma(float(dot), activation_scale * scale, sum)

whatever the tile. So a row's result depends neither on how many rows are computed together nor on its place among them,
and is the same on every processor that has the instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twinstage.models.fused.affine import GROUP, group_bytes
from twinstage.models.fused.intrinsics import F32, I8, I32, I64
from twinstage.models.fused.target import target

LANES = target().lanes
PANEL = target().panel
TILES = (4, 2, 1)  # rows; larger ones leave no registers for the floating-point sums, and are not faster

_HALVES = PANEL // LANES  # vectors side by side in a panel
_FLOATS = ir.VectorType(F32, LANES)
_INTS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, LANES)
_HALF_FLOATS = ir.VectorType(ir.HalfType(), LANES)
CACHE_LINE = 64  # bytes
_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LARGEST = 127.0
_SMALLEST = 1e-30  # a group whose magnitudes are all below counts as zero: 127 / magnitude must be finite


def make_tile(rows: int, *, prefetches: bool) -> Any:
    """An intrinsic `tile(q, q_stride, scales, scales_stride, weight, groups, y, y_stride, accumulate, ahead, lines)`.

    All are int64. `q` is int8 `[rows][groups * GROUP]`, `scales` float32 `[rows][groups][2]` as `quantize_row` writes
    them, `weight` one panel, `y` float32 `[rows][PANEL]`, which it sets, or adds to when `accumulate` is 1. Strides are
    in bytes. A tile that `prefetches` asks, with each group, for `lines` cache lines from `ahead` on, the weights that
    come next, so that they come from memory while it computes; another one has no use for the two.
    """

    def tile(
        typing_context: Any,
        q: Any,
        q_stride: Any,
        scales: Any,
        scales_stride: Any,
        weight: Any,
        groups: Any,
        y: Any,
        y_stride: Any,
        accumulate: Any,
        ahead: Any,
        lines: Any,
    ) -> tuple[Any, Any]:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
            name = f"twinstage_tile_vnni_{rows}{'_ahead' * prefetches}"
            tile = _function(builder.module, name, 11, lambda made: _Tile(made, rows, prefetches=prefetches).build())
            builder.call(tile, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return intrinsic(tile)


def _quantize_row(
    typing_context: Any, x: Any, q: Any, scales: Any, groups: Any, unit: Any
) -> tuple[Any, Callable[..., Any]]:
    """Quantize float32 `x` `[groups * GROUP]` to int8 `q`; `scales` gets `[groups][2]` float32.

    These are the scale of each group times `unit`, and the sum of its integers times that.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        *addresses, unit = arguments
        function = _function(builder.module, "twinstage_quantize_row", 4, _build_quantize, extra=(F32,))
        builder.call(function, [*addresses, unit])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), generate


quantize_row: Any = intrinsic(_quantize_row)


def _function(
    module: ir.Module,
    name: str,
    num_addresses: int,
    build: Callable[[ir.Function], None],
    extra: tuple[ir.Type, ...] = (),
) -> ir.Function:
    """The function of this name in `module`, built when it is not there yet."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * num_addresses + list(extra)), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    build(function)
    return function


class _Builder(ir.IRBuilder):  # type: ignore[misc]
    """LLVM instructions on addresses that are int64 and offsets in bytes."""

    def __init__(self, function: ir.Function) -> None:
        super().__init__(function.append_basic_block("entry"))

    def at(self, address: ir.Value, kind: ir.Type, *, align: int) -> ir.Value:
        loaded = self.load(self.inttoptr(address, kind.as_pointer()))
        loaded.align = align
        return loaded

    def put(self, value: ir.Value, address: ir.Value, *, align: int) -> None:
        self.store(value, self.inttoptr(address, value.type.as_pointer())).align = align

    def offset(self, address: ir.Value, number: int) -> ir.Value:
        return self.add(address, _i64(number))

    def step(self, address: ir.Value, index: ir.Value, size: int) -> ir.Value:
        return self.add(address, self.mul(index, _i64(size)))

    def splat(self, value: ir.Value) -> ir.Value:
        kind = ir.VectorType(value.type, LANES)
        single = self.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return self.shuffle_vector(single, ir.Constant(kind, ir.Undefined), mask)

    def external(self, name: str, kind: ir.FunctionType, arguments: list[ir.Value]) -> ir.Value:
        found = self.module.globals.get(name)
        return self.call(found or ir.Function(self.module, kind, name), arguments)

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.external(f"llvm.fma.v{LANES}f32", ir.FunctionType(_FLOATS, [_FLOATS] * 3), [a, b, c])

    def reduced(self, operation: str, vector: ir.Value) -> ir.Value:
        return self.external(f"llvm.vector.reduce.{operation}.v{LANES}i32", ir.FunctionType(I32, [_INTS]), [vector])

    def prefetch(self, address: ir.Value) -> None:
        """To the second-level cache: what is meant is used next, but more than the first one holds."""
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        hints = [ir.Constant(I32, value) for value in (0, 2, 1)]  # for reading; second level; data
        self.external("llvm.prefetch.p0i8", kind, [self.inttoptr(address, I8.as_pointer()), *hints])

    def loop(self, stop: ir.Value, carried: list[ir.Value], body: Any) -> list[ir.Value]:
        """`body(index, carried) -> carried` for 0 .. stop - 1, with vectors in registers. Runs at least once."""
        before = self.block
        block, after = self.append_basic_block("loop"), self.append_basic_block("after")
        self.branch(block)
        self.position_at_end(block)
        index = self.phi(I64)
        index.add_incoming(_i64(0), before)
        phis = [self.phi(value.type) for value in carried]
        results = body(index, phis)
        following = self.offset(index, 1)
        index.add_incoming(following, self.block)
        for phi, value, result in zip(phis, carried, results, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, self.block)
        self.cbranch(self.icmp_signed("<", following, stop), block, after)
        self.position_at_end(after)
        return list(results)


class _Tile:
    """Writes the body of one tile."""

    def __init__(self, function: ir.Function, rows: int, *, prefetches: bool) -> None:
        self._rows = rows
        self._prefetches = prefetches
        self._b = b = _Builder(function)
        q, q_stride, scales, scales_stride, self._weight, self._groups, y, y_stride, *others = function.args
        self._accumulate, self._ahead, self._lines = others
        self._q, self._scales, self._y = (
            [b.add(base, b.mul(stride, _i64(row))) for row in range(rows)]
            for base, stride in ((q, q_stride), (scales, scales_stride), (y, y_stride))
        )

    def build(self) -> None:
        zeros = [ir.Constant(_FLOATS, [0.0] * LANES)] * (self._rows * _HALVES)
        self._write(self._b.loop(self._groups, zeros, self._one_group))
        self._b.ret_void()

    def _one_group(self, group: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        b = self._b
        weight = b.step(self._weight, group, group_bytes(PANEL))
        if self._prefetches:
            self._prefetch(group)
        dots = self._dots(group, weight)
        scales = [self._half_floats(weight, GROUP * PANEL + 2 * LANES * half) for half in range(_HALVES)]
        minima = [self._half_floats(weight, (GROUP + 2) * PANEL + 2 * LANES * half) for half in range(_HALVES)]
        results = []
        for row in range(self._rows):
            pair = b.step(self._scales[row], group, 8)
            scale, total = (b.splat(b.at(b.offset(pair, 4 * index), F32, align=4)) for index in (0, 1))
            for half in range(_HALVES):
                index = row * _HALVES + half
                shifted = b.fused(minima[half], total, sums[index])
                results.append(b.fused(b.sitofp(dots[index], _FLOATS), b.fmul(scale, scales[half]), shifted))
        return results

    def _prefetch(self, group: ir.Value) -> None:
        b = self._b
        first = b.add(self._ahead, b.mul(b.mul(group, self._lines), _i64(CACHE_LINE)))

        def one_line(index: ir.Value, _carried: list[ir.Value]) -> list[ir.Value]:
            b.prefetch(b.step(first, index, CACHE_LINE))
            return []

        with b.if_then(b.icmp_signed(">", self._lines, _i64(0))):
            b.loop(self._lines, [], one_line)

    def _dots(self, group: ir.Value, weight: ir.Value) -> list[ir.Value]:
        """The dot products of a group: int32 vectors `[rows * _HALVES]`."""
        b = self._b
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        kind = ir.FunctionType(_INTS, [_INTS] * 3)
        rows = [b.step(q, group, GROUP) for q in self._q]
        dots = [ir.Constant(_INTS, [0] * LANES)] * (self._rows * _HALVES)
        for quad in range(GROUP // 4):
            places = [quad * 4 * PANEL + half * 4 * LANES for half in range(_HALVES)]
            weights = [b.at(b.offset(weight, place), _INTS, align=4 * LANES) for place in places]
            for row in range(self._rows):
                four = b.splat(b.at(b.offset(rows[row], 4 * quad), I32, align=4))
                for half in range(_HALVES):
                    index = row * _HALVES + half
                    dots[index] = b.external(name, kind, [dots[index], weights[half], four])
        return dots

    def _half_floats(self, address: ir.Value, place: int) -> ir.Value:
        return self._b.fpext(self._b.at(self._b.offset(address, place), _HALF_FLOATS, align=2 * LANES), _FLOATS)

    def _write(self, sums: list[ir.Value]) -> None:
        b = self._b
        places = [b.offset(y, 4 * LANES * half) for y in self._y for half in range(_HALVES)]
        adds = b.icmp_signed("!=", self._accumulate, _i64(0))
        with b.if_else(adds) as (adding, setting):
            with adding:
                for total, place in zip(sums, places, strict=True):
                    b.put(b.fadd(b.at(place, _FLOATS, align=4), total), place, align=4)
            with setting:
                for total, place in zip(sums, places, strict=True):
                    b.put(total, place, align=4)


def _build_quantize(function: ir.Function) -> None:
    """The body of `quantize_row`."""
    b = _Builder(function)
    x, q, scales, groups, unit = function.args

    def one_group(group: ir.Value, _carried: list[ir.Value]) -> list[ir.Value]:
        start = b.step(x, group, 4 * GROUP)
        values = [b.at(b.offset(start, 4 * LANES * part), _FLOATS, align=4) for part in range(GROUP // LANES)]
        magnitude = _magnitude(b, values)
        is_zero = b.fcmp_ordered("<", magnitude, _f32(_SMALLEST))
        inverse = b.splat(b.select(is_zero, _f32(0.0), b.fdiv(_f32(_LARGEST), magnitude)))
        total = None
        for part, value in enumerate(values):
            # Not a fused operation: the product is rounded, then the sum, as on any processor.
            integers = b.bitcast(b.fadd(b.fmul(value, inverse), _splat(_ROUNDING)), _INTS)
            b.put(b.trunc(integers, _BYTES), b.offset(b.step(q, group, GROUP), LANES * part), align=LANES)
            total = integers if total is None else b.add(total, integers)
        zero = GROUP // LANES * LANES * 0x4B400000  # the bits of `_ROUNDING` in every summand
        summed = b.sub(b.reduced("add", total), ir.Constant(I32, zero & 0xFFFFFFFF))
        scale = b.fmul(b.fdiv(magnitude, _f32(_LARGEST)), unit)
        place = b.step(scales, group, 8)
        b.put(scale, place, align=4)
        b.put(b.fmul(scale, b.sitofp(summed, F32)), b.offset(place, 4), align=4)
        return []

    b.loop(groups, [], one_group)
    b.ret_void()


def _magnitude(b: _Builder, values: list[ir.Value]) -> ir.Value:
    """The largest magnitude: floats without their sign are in the order of their bits, and NaN is above all."""
    mask = ir.Constant(_INTS, [0x7FFFFFFF] * LANES)
    bits = [b.and_(b.bitcast(value, _INTS), mask) for value in values]
    largest = bits[0]
    for other in bits[1:]:
        largest = b.select(b.icmp_unsigned(">", other, largest), other, largest)
    return b.bitcast(b.reduced("umax", largest), F32)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _f32(value: float) -> ir.Constant:
    return ir.Constant(F32, value)


def _splat(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)
