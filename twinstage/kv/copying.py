"""Copying between blocks that lie in main memory anyway: stores go past the caches.

An ordinary copy of a block first reads each target line into a cache, to overwrite it there. A non-temporal store does
not, which takes a third off the time of a copy between pools that are larger than the caches. C libraries do so only
from some megabytes on, more than a block has, so the loop is our own. LLVM compiles it when it is first needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm

_LINE_BYTES = 64  # what a store writes, and its alignment: less would make it an ordinary one
_STEP_LINES = 4
_STEP_BYTES = _STEP_LINES * _LINE_BYTES
_SYMBOL = "twinstage_copy_streaming"


def copy_streaming(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, of the same size, without the interpreter's lock.

    Whatever this thread does afterwards is seen by others only after the bytes are. Raises ValueError for other sizes.
    """
    size = len(source)
    if len(target) != size:
        raise ValueError(f"{size} bytes do not fit exactly into {len(target)}")
    target_address, source_address = _address(target), _address(source)
    head = min(-target_address % _LINE_BYTES, size)
    body = (size - head) // _STEP_BYTES * _STEP_BYTES
    target[:head] = source[:head]
    if body:
        _compiled()(target_address + head, source_address + head, body)
    target[head + body :] = source[head + body :]


def prepare() -> None:
    """Compile now what the first copy would otherwise wait for: some 20 ms."""
    _compiled()


@cache
def _compiled() -> Callable[[int, int, int], None]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_loop()), machine)
    engine.finalize_object()
    _kept.append(engine)
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function: Callable[[int, int, int], None] = prototype(engine.get_function_address(_SYMBOL))
    return function


_kept: list[object] = []  # the code stays in the process: a thread may still run it


def _loop() -> str:
    """LLVM IR of (target, source, size): `size` is a positive multiple of a step, `target` is aligned to a line.

    Such stores may become visible late and in any order; the fence orders them before all that follows.
    """
    lines = range(_STEP_LINES)
    loads = "\n".join(
        f"  %from{line} = getelementptr i8, ptr %source, i64 %at{line}\n"
        f"  %bytes{line} = load <8 x i64>, ptr %from{line}, align 1"
        for line in lines
    )
    stores = "\n".join(
        f"  %to{line} = getelementptr i8, ptr %target, i64 %at{line}\n"
        f"  store <8 x i64> %bytes{line}, ptr %to{line}, align {_LINE_BYTES}, !nontemporal !0"
        for line in lines
    )
    offsets = "\n".join(f"  %at{line} = add i64 %done, {line * _LINE_BYTES}" for line in lines)
    return f"""
define void @{_SYMBOL}(ptr noalias %target, ptr noalias %source, i64 %size) {{
entry:
  br label %step
step:
  %done = phi i64 [0, %entry], [%next, %step]
{offsets}
{loads}
{stores}
  %next = add i64 %done, {_STEP_BYTES}
  %more = icmp ult i64 %next, %size
  br i1 %more, label %step, label %end
end:
  fence seq_cst
  ret void
}}
!0 = !{{i32 1}}
"""


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
