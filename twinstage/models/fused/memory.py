"""Memory for kernels: at addresses that vector instructions like, in large pages where the system gives them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import numpy as np

_LARGE_PAGE_BYTES = 2 * 1024 * 1024


class AlignedMemory:
    """`size` zeroed bytes at a page's start, for as long as this object lives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _LARGE_PAGE_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # a kernel without them
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @staticmethod
    def of(content: bytes | memoryview) -> AlignedMemory:
        """A copy of `content`."""
        memory = AlignedMemory(len(content))
        memory.view()[:] = content
        return memory

    def view(self) -> memoryview:
        """The writable bytes."""
        return memoryview(self._mapping)[: self.size]

    def array(self, dtype: np.dtype[np.generic] | type, shape: tuple[int, ...], *, offset: int = 0) -> np.ndarray:
        """A NumPy array over the bytes from `offset` on."""
        count = int(np.prod(shape))
        return np.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset).reshape(shape)
