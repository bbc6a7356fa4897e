"""A vector register as a Numba type, `LANES` float32 values, and what kernels do with it.

Addresses are int64, in bytes. Nothing is reordered or contracted: what a lane gets is one chain of IEEE operations, the
same for 8 and for 16 lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from twinstage.models.fused.intrinsics import F32, I32, I64, intrinsic
from twinstage.models.fused.target import target

LANES = target().lanes

I8, I16 = ir.IntType(8), ir.IntType(16)
F32_VECTOR = ir.VectorType(F32, LANES)
I32_VECTOR = ir.VectorType(I32, LANES)
I16_VECTOR = ir.VectorType(I16, LANES)
HALF_VECTOR = ir.VectorType(ir.HalfType(), LANES)

# (2^r - 1) / r for -0.5 <= r <= 0.5: the polynomial of degree 5 through the six Chebyshev nodes, computed in double
# precision and rounded to float32. 2^x comes out within 1.0e-7 of itself (tests/test_fused_vectors.py).
EXP2_COEFFICIENTS = (0.69314718, 0.24022651, 0.055503570, 0.0096180830, 0.0013390863, 0.00015453163)
EXP2_LOWEST = -126.0  # below it 2^x counts as 0; as a weight of a softmax, 1e-38 is nothing

_Generate = Callable[[Any, ir.IRBuilder, Any, Any], Any]


class VectorType(types.Type):
    """The Numba type of a vector register of float32 values."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        models.PrimitiveModel.__init__(self, manager, kind, F32_VECTOR)  # type: ignore[no-untyped-call]


def operation(emit: Callable[..., Any], result: types.Type, *accepted: types.Type) -> Any:
    """An intrinsic of 1 to 4 arguments that emits `emit(builder, *arguments)`."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if result is types.void else value

    typed: tuple[Any, _Generate] = result(*accepted), generate
    of_arity: dict[int, Callable[..., Any]] = {  # Numba reads the number of arguments from the function
        1: lambda typing_context, a: typed,
        2: lambda typing_context, a, b: typed,
        3: lambda typing_context, a, b, c: typed,
        4: lambda typing_context, a, b, c, d: typed,
    }
    return intrinsic(of_arity[len(accepted)])


# --- emitting, also for the register tiles of `panels` -------------------------------------------


def emit_load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a value of `kind` from an address of any alignment."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def emit_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Store `value` at an address of any alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def emit_load_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load float16 values as float32, exactly."""
    return builder.fpext(emit_load(builder, address, HALF_VECTOR), F32_VECTOR)


def emit_load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load bfloat16 values as float32, exactly: they are the upper halves."""
    wide = builder.zext(emit_load(builder, address, I16_VECTOR), I32_VECTOR)
    return builder.bitcast(builder.shl(wide, ints(16)), F32_VECTOR)


def emit_store_f16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Store as float16, rounded to nearest even; infinity beyond 65504."""
    emit_store(builder, address, builder.fptrunc(value, HALF_VECTOR))


def emit_store_bf16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Store as bfloat16, rounded to nearest even; not a number stays that."""
    emit_store(builder, address, builder.trunc(builder.lshr(emit_round_bf16(builder, value), ints(16)), I16_VECTOR))


def emit_round_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round as `emit_store_bf16` does: 32-bit integers whose upper halves are the bfloat16 numbers."""
    bits = builder.bitcast(value, I32_VECTOR)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(bits, builder.add(odd, ints(0x7FFF)))
    quiet = builder.or_(bits, ints(0x400000))
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)


def emit_splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """All lanes `value`."""
    one = builder.insert_element(ir.Constant(F32_VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(F32_VECTOR, ir.Undefined), ir.Constant(I32_VECTOR, [0] * LANES))


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """A * b + c, rounded once."""
    return _call(builder, "llvm.fma", a, b, c)


def floats(value: float) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(F32_VECTOR, [value] * LANES)


def ints(value: int) -> ir.Constant:
    """A constant vector of 32-bit integers."""
    return ir.Constant(I32_VECTOR, [value] * LANES)


def _call(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> ir.Value:
    signature = ir.FunctionType(F32_VECTOR, [F32_VECTOR] * len(arguments))
    return builder.call(builder.module.declare_intrinsic(f"{name}.v{LANES}f32", (), signature), arguments)


def _emit_exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    lowest = floats(EXP2_LOWEST)
    clamped = _emit_max(builder, x, lowest)
    whole = _call(builder, "llvm.rint", clamped)
    rest = builder.fsub(clamped, whole)  # exact
    sums = floats(EXP2_COEFFICIENTS[-1])
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1.0):
        sums = emit_fma(builder, sums, rest, floats(coefficient))
    exponent = builder.shl(builder.fptosi(whole, I32_VECTOR), ints(23))
    scaled = builder.bitcast(builder.add(builder.bitcast(sums, I32_VECTOR), exponent), F32_VECTOR)
    return builder.select(builder.fcmp_ordered("<", x, lowest), floats(0.0), scaled)


def _emit_max(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)  # one instruction on x86


def _emit_masked(builder: ir.IRBuilder, value: ir.Value, place: ir.Value, first: ir.Value, end: ir.Value) -> ir.Value:
    inside = builder.and_(builder.fcmp_ordered(">=", place, first), builder.fcmp_ordered("<", place, end))
    return builder.select(inside, value, floats(float("-inf")))


def _emit_highest(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    signature = ir.FunctionType(F32, [F32_VECTOR])
    function = builder.module.declare_intrinsic(f"llvm.vector.reduce.fmax.v{LANES}f32", (), signature)
    return builder.call(function, [value])


def _emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch.p0", (), signature)
    arguments = [builder.inttoptr(address, pointer), *(ir.Constant(I32, value) for value in (0, 3, 1))]
    builder.call(function, arguments)  # to read, into all caches, data


def _emit_take(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), count, "seq_cst")


# --- what kernels call ---------------------------------------------------------------------------

_address = types.int64

load = operation(lambda b, address: emit_load(b, address, F32_VECTOR), vector, _address)
load_f16 = operation(emit_load_f16, vector, _address)
load_bf16 = operation(emit_load_bf16, vector, _address)
store = operation(emit_store, types.void, _address, vector)
store_f16 = operation(emit_store_f16, types.void, _address, vector)
store_bf16 = operation(emit_store_bf16, types.void, _address, vector)
splat = operation(emit_splat, vector, types.float32)
splat_from = operation(lambda b, address: emit_splat(b, emit_load(b, address, F32)), vector, _address)
counting = operation(  # the lanes are start, start + 1, ...
    lambda b, start: b.fadd(emit_splat(b, start), ir.Constant(F32_VECTOR, [float(lane) for lane in range(LANES)])),
    vector,
    types.float32,
)
add = operation(lambda b, x, y: b.fadd(x, y), vector, vector, vector)
subtract = operation(lambda b, x, y: b.fsub(x, y), vector, vector, vector)
multiply = operation(lambda b, x, y: b.fmul(x, y), vector, vector, vector)
divide = operation(lambda b, x, y: b.fdiv(x, y), vector, vector, vector)
fma = operation(emit_fma, vector, vector, vector, vector)
larger = operation(_emit_max, vector, vector, vector)
exp2 = operation(_emit_exp2, vector, vector)  # of x <= 0; 0 below EXP2_LOWEST
masked = operation(_emit_masked, vector, vector, vector, vector, vector)  # -inf unless first <= place < end
highest = operation(_emit_highest, types.float32, vector)  # of all lanes
prefetch = operation(_emit_prefetch, types.void, _address)
take = operation(_emit_take, types.int64, _address, types.int64)  # atomically adds to an int64; what was there before

LOAD = {"float32": load, "float16": load_f16, "bfloat16": load_bf16}
STORE = {"float32": store, "float16": store_f16, "bfloat16": store_bf16}
