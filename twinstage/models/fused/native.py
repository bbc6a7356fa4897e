"""Compiled kernels as object code: written to bytes and back, loaded into the process, and called. Free of Numba."""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProgram:
    """Object files that are linked together, and the symbol of their entry point, a function of two int64."""

    objects: tuple[bytes, ...]
    symbol: str

    def to_bytes(self) -> bytes:
        header = json.dumps({"symbol": self.symbol, "sizes": [len(code) for code in self.objects]}).encode()
        return struct.pack("<Q", len(header)) + header + b"".join(self.objects)

    @staticmethod
    def from_bytes(data: bytes) -> NativeProgram:
        """Read what `to_bytes` wrote."""
        (header_bytes,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + header_bytes])
        objects, start = [], 8 + header_bytes
        for size in header["sizes"]:
            objects.append(data[start : start + size])
            start += size
        return NativeProgram(objects=tuple(objects), symbol=header["symbol"])


class LoadedProgram:
    """A program that can be called. What is loaded stays in the process: a thread may still be in it."""

    def __init__(self, program: NativeProgram) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in program.objects:
            engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _loaded.append(engine)
        # Numba's calling convention: where a result and an exception would go, then the arguments.
        parameters = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._function = ctypes.CFUNCTYPE(ctypes.c_int32, *parameters)(engine.get_function_address(program.symbol))
        self._unused = ctypes.create_string_buffer(16)

    def __call__(self, first: int, second: int) -> None:
        """Call the entry point, without the GIL."""
        unused = ctypes.addressof(self._unused)
        self._function(unused, unused, first, second)


_loaded: list[object] = []
