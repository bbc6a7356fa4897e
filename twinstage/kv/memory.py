"""The bytes behind the KV blocks: an anonymous file that another process on the host can map too.

The file is sealed against resizing, so a peer that maps it can never be killed by a page that went away, and both
sides populate their mapping at once, because a first touch costs several times a copy. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

from twinstage.errors import ConfigError, StaleHandle, TransferError

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23  # linux/mman.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class BlockMemory:
    """`num_blocks` blocks of `block_bytes` bytes each, in one shared mapping.

    Made by `create` (its owner) or `attach` (a peer that was given the file descriptor). Views that were handed out
    keep the mapping alive after `close`.
    """

    def __init__(self, fd: int, *, num_blocks: int, block_bytes: int) -> None:
        """Map `fd`, which this object owns from now on. Use `create` or `attach`."""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._fd = fd
        self._closed = False
        self._mapping = _map_populated(fd, size=num_blocks * block_bytes)
        self._view = memoryview(self._mapping)

    @classmethod
    def create(cls, *, num_blocks: int, block_bytes: int) -> BlockMemory:
        """New zeroed memory. Raises ConfigError when the sizes are wrong or the machine cannot give that much."""
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"KV memory needs at least one block of one byte, not {num_blocks} of {block_bytes}")
        fd = -1
        try:
            fd = os.memfd_create("twinstage-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_blocks * block_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            return cls(fd, num_blocks=num_blocks, block_bytes=block_bytes)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            size = num_blocks * block_bytes
            raise ConfigError(f"cannot map {size} bytes of KV memory ({error}); lower --kv-cache-bytes") from error

    @classmethod
    def attach(cls, fd: int, *, num_blocks: int, block_bytes: int) -> BlockMemory:
        """Map memory that another process created. `fd` is duplicated; the caller closes its own.

        Raises ConfigError when the sizes are wrong, TransferError when the file is not one of `create` or has
        another size.
        """
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(f"KV memory needs at least one block of one byte, not {num_blocks} of {block_bytes}")
        _check_file(fd, size=num_blocks * block_bytes)
        own = os.dup(fd)
        try:
            return cls(own, num_blocks=num_blocks, block_bytes=block_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(own)
            raise TransferError(f"cannot map the peer's KV memory: {error}") from error

    @property
    def fd(self) -> int:
        """The file descriptor, to be passed to a peer. Raises TransferError when closed."""
        self._check_open()
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def block(self, block_id: int) -> memoryview:
        """The writable bytes of one block.

        Raises StaleHandle when there is no such block, TransferError when the memory is closed.
        """
        self._check_open()
        if not 0 <= block_id < self.num_blocks:
            raise StaleHandle(f"block {block_id} is not one of the {self.num_blocks} blocks of this memory")
        start = block_id * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def copy_block(self, source: int, target: int) -> None:
        """Make the bytes of one block those of another. Raises as `block`. Runs without the interpreter's lock."""
        place, content = self.block(target), self.block(source)
        ctypes.memmove(_address(place), _address(content), self.block_bytes)

    def view(self) -> memoryview:
        """The writable bytes of all blocks. Raises TransferError when closed."""
        self._check_open()
        return self._view[:]

    def close(self) -> None:
        """Close the file and unmap it as soon as no view is left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self._fd)
        self._view.release()
        # A tensor or a write in flight may still look at the bytes; then the mapping ends with the last of them.
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the KV memory is closed")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _check_file(fd: int, *, size: int) -> None:
    """Raise TransferError unless `fd` is a file of `size` bytes whose size cannot change any more."""
    try:
        actual = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransferError(f"the file descriptor is not KV memory: {error}") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise TransferError("the peer's KV memory is not sealed against resizing")
    if actual != size:
        raise TransferError(f"the peer's KV memory has {actual} bytes, {size} were expected")


def _map_populated(fd: int, *, size: int) -> mmap.mmap:
    """Map `fd` with every page in place. Raises OSError.

    A call through ctypes runs without the interpreter's lock; with mmap's own flag, a prefill worker that maps the pool
    of a new peer would stand still for as long as that takes.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)
    if _LIBC.madvise(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), size, _MADV_POPULATE_WRITE) == 0:
        return mapping
    number = ctypes.get_errno()
    mapping.close()
    if number != errno.EINVAL:
        raise OSError(number, os.strerror(number))
    # A kernel before 5.14.
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
