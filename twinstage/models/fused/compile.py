"""From kernels in Python to object code: Numba types and translates them, LLVM compiles them for the target."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import types

from twinstage.models.fused.attention_work import AttentionShape
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.native import NativeProgram
from twinstage.models.fused.step import make_entry_point
from twinstage.models.fused.target import target
from twinstage.models.fused.tiles import tile_code

_TILE_SYMBOLS = ("twinstage_tile_f32", "twinstage_tile_i8", "twinstage_expand_panel")


def compile_program(weight_format: WeightFormat, shape: AttentionShape) -> NativeProgram:
    """Compile everything that a model with weights of this format and heads of `shape` computes with: takes seconds."""
    config: Any = numba.config
    config.CPU_NAME, config.CPU_FEATURES = target().cpu, target().features
    # Numba links what it compiles into this process, and there the tiles are missing; nothing is called that way.
    placeholder = ctypes.cast(ctypes.CFUNCTYPE(None)(_never_called), ctypes.c_void_p).value
    for name in _TILE_SYMBOLS:
        llvm.add_symbol(name, placeholder)
    function, signature = make_entry_point(weight_format, shape), (types.int64, types.int64)
    function.compile(signature)
    objects = [emit_object(function.inspect_llvm(signature), optimize=False)]
    if weight_format is not WeightFormat.AFFINE8:  # whose tiles Numba compiles
        objects.append(emit_object(tile_code(int8=weight_format is WeightFormat.INT8), optimize=True))
    return NativeProgram(
        objects=tuple(objects),
        symbol=function.overloads[signature].fndesc.llvm_func_name,
    )


def emit_object(code: str, *, optimize: bool) -> bytes:
    """Object code of LLVM IR, which Numba has optimized already and others may need."""
    module = llvm.parse_assembly(code)
    module.triple = llvm.get_process_triple()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=target().cpu, features=target().features, opt=3, jit=True
    )
    if optimize:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
    emitted: Any = machine.emit_object(module)
    return bytes(emitted)


def _never_called() -> None:
    raise AssertionError("a placeholder was called")
