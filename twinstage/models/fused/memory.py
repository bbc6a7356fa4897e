"""Memory for kernels: at addresses that vector instructions like, in large pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

_LARGE_PAGE_BYTES = 2 * 1024 * 1024


class Memory:
    """`size` bytes of a mapping, from `offset` on, for as long as this object lives; `address` is a multiple of 64."""

    def __init__(self, mapping: mmap.mmap, size: int, *, offset: int = 0) -> None:
        self.size = size
        self._mapping = mapping
        self._offset = offset
        self.address = int(np.frombuffer(mapping, np.uint8).ctypes.data) + offset

    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(self._mapping)[self._offset : self._offset + self.size]

    def array(self, dtype: np.dtype[np.generic] | type, shape: tuple[int, ...], *, offset: int = 0) -> np.ndarray:
        """A NumPy array over the bytes from `offset` on."""
        count = int(np.prod(shape))
        return np.frombuffer(self.view(), dtype=dtype, count=count, offset=offset).reshape(shape)


class AlignedMemory(Memory):
    """Zeroed bytes of this process alone, writable, that begin at a page's start."""

    def __init__(self, size: int) -> None:
        mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _prefer_large_pages(mapping, size)
        super().__init__(mapping, size)

    @staticmethod
    def of(content: bytes | memoryview) -> AlignedMemory:
        """A copy of `content`."""
        memory = AlignedMemory(len(content))
        memory.view()[:] = content
        return memory


class FileMemory(Memory):
    """The bytes of a file from `offset` on, read-only, in pages that all processes share which map the file.

    The file must not be cut short while it is mapped: the kernel ends a process that reads what is no longer there.
    """

    def __init__(self, descriptor: int, size: int, *, offset: int) -> None:
        """Map the file, which may be closed afterwards. Raises OSError, and ValueError when it is shorter."""
        mapping = mmap.mmap(descriptor, offset + size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        _prefer_large_pages(mapping, size)
        super().__init__(mapping, size, offset=offset)


def _prefer_large_pages(mapping: mmap.mmap, size: int) -> None:
    """Ask for them; a file gets them where its file system reads it in large pieces."""
    if size >= _LARGE_PAGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
