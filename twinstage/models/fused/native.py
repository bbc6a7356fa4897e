"""Compiled kernels as object code: written to bytes and back, loaded into the process, and called. Free of Numba."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProgram:
    """Object files that are linked together, and the symbol of their entry point, a function of two int64."""

    objects: tuple[bytes, ...]
    symbol: str

    def to_bytes(self) -> bytes:
        header = {"symbol": self.symbol, "sizes": [len(code) for code in self.objects]}
        return write_header(header) + b"".join(self.objects)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> NativeProgram:
        """Read what `to_bytes` wrote. Raises ValueError when it is anything else."""
        header, start = read_header(data)
        symbol, sizes = header.get("symbol"), header.get("sizes")
        if not isinstance(symbol, str) or not isinstance(sizes, list) or not all(map(_is_size, sizes)):
            raise ValueError("its header names no symbol and sizes")
        if start + sum(sizes) != len(data):
            raise ValueError(f"{len(data) - start} bytes follow its header, which announces {sum(sizes)}")
        objects = []
        for size in sizes:
            objects.append(bytes(data[start : start + size]))
            start += size
        return NativeProgram(objects=tuple(objects), symbol=symbol)


def write_header(header: Mapping[str, Any]) -> bytes:
    """`header` in JSON, with its length before it."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text


def read_header(data: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """What `write_header` wrote at the beginning of `data`, and where it ends. Raises ValueError."""
    if len(data) < _LENGTH.size:
        raise ValueError("it is too short for a header")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ValueError(f"its header has {length} bytes, and there are {len(data)}")
    header = json.loads(bytes(data[_LENGTH.size : end]))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, end


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


_LENGTH = struct.Struct("<Q")


class LoadedProgram:
    """A program that can be called. What is loaded stays in the process: a thread may still be in it."""

    def __init__(self, program: NativeProgram) -> None:
        import llvmlite.binding as llvm  # stock modules run where LLVM cannot be loaded

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
