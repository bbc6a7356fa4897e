"""Files that take time to make, kept in the cache: found by a key that covers all that they depend on.

A file is written beside its place and moved there when it is whole; a lock lets one process make it while others wait.
It is mapped read-only, so processes share its pages. As it holds machine code and what machine code trusts, it counts
only when this user or root owns it and nobody else may write it, when it says itself that it is what was looked for,
when its bytes have the digest that it names, and when they can be parsed; any other file is made again, and the log
says why. A cache that cannot be used costs time, not service: the result is used from memory. Keys change with models
and versions, so files that nobody has used for a month are removed when another one is written beside them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import filelock
import xxhash

from twinstage.models.fused.memory import FileMemory, Memory
from twinstage.telemetry.log import get_logger

_MAGIC = b"TWINART2"
_HEADER = struct.Struct("<8s64sQQ")  # magic, kind and key, bytes that follow, their xxh3
_HEADER_BYTES = 4096  # so that what follows begins at a page's start
_LOCK_TIMEOUT_S = 900.0
_UNUSED_S = 30 * 86400.0

T = TypeVar("T")
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file of the cache: `<directory>/<kind>/<name>-<key>.bin`; kind and key have 60 characters at most."""

    directory: Path
    kind: str
    name: str
    key: str

    @property
    def path(self) -> Path:
        return self.directory / self.kind / f"{self.name}-{self.key}.bin"

    def load_or_make(
        self, make: Callable[[], Memory], parse: Callable[[Memory], T], *, fill: Callable[[], None] | None = None
    ) -> T:
        """What `parse` reads from the content, which comes from the cache or from `make`, whose errors pass through.

        `parse` raises ValueError when it cannot read the content; what the cache has is then made again. `fill`, whose
        errors pass through, too, is called before that and may have another process put it there.
        """
        found = self._read(parse)
        if found is None and fill is not None and self._can_be_kept():
            fill()
            found = self._read(parse)
        if found is not None:
            return found
        with contextlib.ExitStack() as stack:
            try:
                _make_private_directory(self.path.parent)
                stack.enter_context(self._locked())
            except OSError as error:
                self._warn_unusable(error)
                usable = False
            else:
                usable = True
                found = self._read(parse)  # another process may have made it meanwhile
                if found is not None:
                    return found
            content = make()
            if usable:
                found = self._keep(content, parse)
        return found if found is not None else parse(content)

    def _keep(self, content: Memory, parse: Callable[[Memory], T]) -> T | None:
        """Write the content and read it again, as a file shares its pages; None where that fails."""
        try:
            self._write(content.view())
        except OSError as error:
            self._warn_unusable(error)
            return None
        self._remove_unused()
        return self._read(parse)

    def _remove_unused(self) -> None:
        """Who has one of them mapped keeps it."""
        limit_s = time.time() - _UNUSED_S
        for path in self.path.parent.glob("*.bin"):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < limit_s:
                    path.unlink()

    def _can_be_kept(self) -> bool:
        try:
            _make_private_directory(self.path.parent)
        except OSError:
            return False
        return os.access(self.path.parent, os.W_OK)

    def _warn_unusable(self, error: OSError) -> None:
        logger.warning(
            "the cache cannot be written, so this will be made again at every start; choose another directory with "
            "--cache-directory or TWINSTAGE_CACHE",
            path=str(self.path),
            error=str(error),
        )

    def _read(self, parse: Callable[[Memory], T]) -> T | None:
        """What `parse` makes of the file when it is there, may be trusted and is whole."""
        try:
            # Without O_NONBLOCK, a named pipe in its place would keep us waiting.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("a file of the cache cannot be opened", path=str(self.path), error=str(error))
            return None
        try:
            return parse(self._checked(descriptor))
        except (OSError, ValueError) as error:
            logger.warning("a file of the cache is not used and is made again", path=str(self.path), error=str(error))
            return None
        finally:
            os.close(descriptor)

    def _checked(self, descriptor: int) -> Memory:
        """The content of an open file. Raises OSError, and ValueError that says why it is not to be used."""
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        reason = why_untrusted(found)
        if reason:
            raise ValueError(reason)
        header = os.pread(descriptor, _HEADER_BYTES, 0)
        if len(header) != _HEADER_BYTES:
            raise ValueError("it is cut short")
        magic, identity, size, digest = _HEADER.unpack_from(header)
        if magic != _MAGIC or identity != self._identity:
            raise ValueError("it is another file than its name says")
        if found.st_size != _HEADER_BYTES + size:
            raise ValueError(f"it has {found.st_size} bytes instead of {_HEADER_BYTES + size}")
        memory = FileMemory(descriptor, size, offset=_HEADER_BYTES)
        if xxhash.xxh3_64_intdigest(memory.view()) != digest:
            raise ValueError("its digest is wrong")
        with contextlib.suppress(OSError):  # on a file system that is only read, nobody removes it either
            os.utime(descriptor)
        return memory

    @property
    def _identity(self) -> bytes:
        return f"{self.kind}/{self.key}".encode().ljust(64, b"\0")

    def _write(self, content: memoryview) -> None:
        header = _HEADER.pack(_MAGIC, self._identity, len(content), xxhash.xxh3_64_intdigest(content))
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(header.ljust(_HEADER_BYTES, b"\0"))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                # Read again, in large pieces, it lies in large pages, in which kernels find their weights faster.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.rename(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of this file, across processes. Raises OSError when another one does not give it up."""
        lock = filelock.FileLock(f"{self.path}.lock")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            raise OSError(f"another process has held {self.path.name}.lock for too long") from error
        try:
            yield
        finally:
            lock.release()


def why_untrusted(found: os.stat_result) -> str:
    """Why a file or directory may hold what others put there, in words; empty when only this user and root can."""
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, not to this one"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write it: its mode is {stat.S_IMODE(found.st_mode):o}"
    return ""


def _make_private_directory(directory: Path) -> None:
    """Have `directory`, for this user alone. Raises OSError, also when it is somebody else's."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.stat()
    if found.st_uid == os.geteuid() and why_untrusted(found):
        logger.warning("a directory of the cache was writable for others", path=str(directory))
        directory.chmod(0o700)
        found = directory.stat()
    if reason := why_untrusted(found):
        raise PermissionError(f"{directory} is not used: {reason}")
