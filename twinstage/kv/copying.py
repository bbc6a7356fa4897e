"""Copying bytes and computing their checksum in one pass, for blocks on their way to another worker's pool.

Both pools are larger than the caches, so what a copy costs is its way to main memory and back. Two things are saved. An
ordinary copy first reads each target line into a cache, to overwrite it there; stores past the caches do not, but C
libraries use them only for copies of more megabytes than a block has. And a checksum computed apart reads everything
again; computed on what is in a register anyway, it is free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import xxhash

from twinstage.kv.copy_code import LINE_BYTES, MIN_BYTES, SYMBOL, copy_code


def copy_with_checksum(target: memoryview, source: memoryview) -> int:
    """Copy `source` to `target`, which does not overlap it, and return xxh3_64 of what was read.

    Runs without the interpreter's lock. What this thread writes afterwards is seen by others only after the copy is.
    Raises ValueError when the sizes differ.
    """
    size = len(source)
    if len(target) != size:
        raise ValueError(f"{size} bytes do not fit exactly into {len(target)}")
    if size >= MIN_BYTES and size % LINE_BYTES == 0 and (address := _address(target)) % LINE_BYTES == 0:
        return _compiled()(address, _address(source), size)
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    return xxhash.xxh3_64_intdigest(source)


def prepare() -> None:
    """Compile now what the first copy would wait for: some 20 ms."""
    _compiled()


@cache
def _compiled() -> Callable[[int, int, int], int]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(copy_code()), machine)
    engine.finalize_object()
    _kept.append(engine)
    prototype = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function: Callable[[int, int, int], int] = prototype(engine.get_function_address(SYMBOL))
    return function


_kept: list[object] = []  # the code stays in the process: a thread may still run it


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
