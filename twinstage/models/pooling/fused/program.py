"""The compiled kernels of encoders: from the cache, or made and put there."""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path
from typing import Any

from twinstage.models.fused.artifacts import Artifact
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.load import NOT_COMPILED, digest, sources
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.native import LoadedProgram, NativeProgram
from twinstage.models.fused.target import target

_NOT_COMPILED = ("model.py", "program.py", "weights.py")
_SYMBOLS = ("twinstage_tile_f32", "twinstage_tile_i8", "twinstage_expand_panel")


def load_program(weight_format: WeightFormat, cache_directory: Path) -> LoadedProgram:
    """The kernels for weights of this format, which are for all models and sizes."""
    program = Artifact(
        directory=cache_directory, kind="kernels", name=f"encoder-{weight_format}", key=_key(weight_format)
    ).load_or_make(
        lambda: AlignedMemory.of(_compile(weight_format).to_bytes()),
        lambda memory: NativeProgram.from_bytes(memory.view()),
    )
    return LoadedProgram(program)


def _key(weight_format: WeightFormat) -> str:
    """Identifies compiled kernels by all that they depend on: their source, the compiler and the CPU."""
    import llvmlite.binding as llvm

    versions = [f"{package}={importlib.metadata.version(package)}" for package in ("numba", "llvmlite")]
    return digest(
        sources(("*.py",), without=_NOT_COMPILED, directory=Path(__file__).parent),
        sources(("*.py",), without=NOT_COMPILED),
        weight_format,
        *versions,
        str(llvm.llvm_version_info),
        target().cpu,
        target().features,
    )


def _compile(weight_format: WeightFormat) -> NativeProgram:
    """Takes seconds, the first of which Numba needs to be imported."""
    import llvmlite.binding as llvm
    import numba
    from numba import types

    from twinstage.models.fused.compile import emit_object
    from twinstage.models.fused.tiles import tile_code
    from twinstage.models.pooling.fused.step import make_entry_point

    config: Any = numba.config
    config.CPU_NAME, config.CPU_FEATURES = target().cpu, target().features
    # Numba links what it compiles into this process, and there the tiles are missing; nothing is called that way.
    placeholder = ctypes.cast(ctypes.CFUNCTYPE(None)(_never_called), ctypes.c_void_p).value
    for name in _SYMBOLS:
        llvm.add_symbol(name, placeholder)
    function, signature = make_entry_point(weight_format), (types.int64, types.int64)
    function.compile(signature)
    objects = [emit_object(function.inspect_llvm(signature), optimize=False)]
    if weight_format is WeightFormat.FP32:
        objects.append(emit_object(tile_code(int8=False), optimize=True))
    symbol = function.overloads[signature].fndesc.llvm_func_name
    return NativeProgram(objects=tuple(objects), symbol=symbol)


def _never_called() -> None:
    raise AssertionError("a placeholder was called")
