"""What kernels reach memory with: addresses are plain int64, so a kernel needs no array, no allocation, no runtime.

Indices count elements from the address. `external` calls what was compiled apart from Numba, or the C library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import extending, types

from twinstage.models.fused.target import target

_njit: Any = numba.njit  # its annotations leave out the options that go to the target

LANES = target().lanes
F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)

_KERNEL_OPTIONS = {"error_model": "numpy", "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_Codegen = Callable[[Any, ir.IRBuilder, Any, Any], Any]


def kernel(function: Callable[..., Any]) -> Any:
    """A function of the compiled step: int64 and float arguments, no exceptions, no runtime of Numba."""
    return _njit(**_KERNEL_OPTIONS)(function)


def reducing_kernel(function: Callable[..., Any]) -> Any:
    """A kernel whose sums the compiler may reorder into vectors: once, when it compiles, so always in the same way."""
    return _njit(
        error_model="numpy",
        _nrt=False,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        fastmath={"reassoc", "contract"},
    )(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function of kernels that writes its own LLVM IR."""
    found: Any = extending.intrinsic(function)
    return found


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
load_i8 = intrinsic(_loader(I8, types.int8))
load_i32 = intrinsic(_loader(I32, types.int32))
load_i64 = intrinsic(_loader(I64, types.int64))
store_f32 = intrinsic(_storer(F32, types.float32))
store_i64 = intrinsic(_storer(I64, types.int64))


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> tuple[Any, _Codegen]:
    """Add to an int64 that other threads use; returns what it was before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> tuple[Any, _Codegen]:
    """An int64 that another thread writes with `store_release`, and with it all that this thread wrote before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.load_atomic(pointer(builder, arguments[0], I64), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> tuple[Any, _Codegen]:
    """Write an int64 for `load_acquire` of other threads."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        builder.store_atomic(arguments[1], pointer(builder, arguments[0], I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def spin_pause(typing_context: Any) -> tuple[Any, _Codegen]:
    """Tell the processor that this thread waits in a loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [])
        name = "llvm.x86.sse2.pause"
        builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_processor(typing_context: Any) -> tuple[Any, _Codegen]:
    """Let another thread run that has no processor, if there is one."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        builder.call(_libc(builder, "sched_yield", []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def semaphore_wait(typing_context: Any, semaphore: Any) -> tuple[Any, _Codegen]:
    """Wait on a `sem_t` at an address; other than 0 when a signal interrupted the wait."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.call(_libc(builder, "sem_wait", [I64]), arguments)

    return types.int32(types.int64), generate


@intrinsic
def semaphore_post(typing_context: Any, semaphore: Any) -> tuple[Any, _Codegen]:
    """Wake one thread that waits on a `sem_t` at an address, or the next that will."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.call(_libc(builder, "sem_post", [I64]), arguments)

    return types.int32(types.int64), generate


@intrinsic
def futex_wait(typing_context: Any, address: Any, expected: Any) -> tuple[Any, _Codegen]:
    """Sleep until another thread of this process wakes who waits on the int64 at an address, or for no reason at all.

    Not when its lower 32 bits are no longer those of `expected`. futex(2)
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        address, expected = arguments
        expected = builder.and_(expected, ir.Constant(I64, 0xFFFFFFFF))
        return _futex(builder, address, ir.Constant(I64, _FUTEX_WAIT_PRIVATE), expected)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def futex_wake_all(typing_context: Any, address: Any) -> tuple[Any, _Codegen]:
    """Wake all threads of this process that sleep in `futex_wait` on an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        everyone = ir.Constant(I64, 0x7FFFFFFF)
        return _futex(builder, arguments[0], ir.Constant(I64, _FUTEX_WAKE_PRIVATE), everyone)

    return types.int64(types.int64), generate


_FUTEX, _FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 202, 128, 129  # linux/futex.h; the number of the call on x86-64


def _futex(builder: ir.IRBuilder, address: ir.Value, operation: ir.Value, value: ir.Value) -> ir.Value:
    name = "syscall"
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    no_timeout = ir.Constant(I64, 0)
    return builder.call(function, [ir.Constant(I64, _FUTEX), address, operation, value, no_timeout])


def _libc(builder: ir.IRBuilder, name: str, arguments: list[ir.Type]) -> ir.Function:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(I32, arguments), name)


def external(name: str, num_arguments: int) -> Any:
    """A C function of int64 arguments and no result; whoever loads the compiled code has to know the symbol."""
    parameters = ", ".join(f"a{index}" for index in range(num_arguments))

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_arguments)
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, arguments)
        return context.get_dummy_value()

    def typed(*_arguments: Any) -> tuple[Any, _Codegen]:
        return types.void(*[types.int64] * num_arguments), generate

    # Numba reads the names of the parameters, so there must be as many as arguments.
    scope: dict[str, Any] = {"typed": typed}
    exec(f"def {name}(typing_context, {parameters}): return typed({parameters})", scope)
    return intrinsic(scope[name])


@intrinsic
def exp(typing_context: Any, value: Any) -> tuple[Any, _Codegen]:
    """E to the power of a float32, with an error of about one unit in the last place; 0 below -87, inf never.

    2^n * p(r) with n the nearest integer to x / ln 2: straight arithmetic, which the compiler vectorizes.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        b = builder
        x = _clamped(b, arguments[0])
        shifted = _fma(b, x, _f32(1.4426950408889634), _f32(_ROUNDING))
        n = b.fsub(shifted, _f32(_ROUNDING))
        r = _fma(b, n, _f32(-1.42860682030941723212e-6), _fma(b, n, _f32(-0.693145751953125), x))
        p = _f32(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            p = _fma(b, p, r, _f32(coefficient))
        exponent = b.shl(b.bitcast(shifted, I32), ir.Constant(I32, 23))  # the low bits of `shifted` are n
        return b.bitcast(b.add(b.bitcast(p, I32), exponent), F32)

    return types.float32(types.float32), generate


_ROUNDING = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_EXP_LIMITS = (-87.0, 88.0)
# 1/6! .. 1, the Taylor series; |r| <= ln(2) / 2, so the first term left out is below 2e-7 of the result's half unit.
_EXP_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def _f32(value: float) -> ir.Constant:
    return ir.Constant(F32, value)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    function = builder.module.declare_intrinsic("llvm.fma", [F32], ir.FunctionType(F32, [F32] * 3))
    return builder.call(function, [a, b, c])


def _clamped(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    low, high = (_f32(limit) for limit in _EXP_LIMITS)
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)
