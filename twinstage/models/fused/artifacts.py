"""Files that take time to make, kept in the cache: found by a key that covers all that they depend on.

A file is written beside its place and moved there when it is whole; a lock lets one process make it while others wait.
What is read is checked against the digest at its beginning; a damaged file is made again. A cache that cannot be
written costs time, not service: the result is used from memory, and the log says so.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import xxhash

from twinstage.models.fused.memory import AlignedMemory
from twinstage.telemetry.log import get_logger

_MAGIC = b"TWINART1"
_HEADER = struct.Struct("<8sQQ")  # magic, bytes that follow, their xxh3
_HEADER_BYTES = 64  # so that what follows stays aligned
_LOCK_TIMEOUT_S = 900.0

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file of the cache: `<directory>/<kind>/<name>-<key>.bin`."""

    directory: Path
    kind: str
    name: str
    key: str

    @property
    def path(self) -> Path:
        return self.directory / self.kind / f"{self.name}-{self.key}.bin"

    def load_or_make(self, make: Callable[[], AlignedMemory]) -> AlignedMemory:
        """The content, from the cache or by `make`, whose errors pass through."""
        found = self._read()
        if found is not None:
            return found
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                found = self._read()
                return found if found is not None else self._make_and_keep(make)
        except OSError as error:
            logger.warning(
                "the cache cannot be written, so this will be made again at every start; choose another directory with "
                "--cache-directory or TWINSTAGE_CACHE",
                path=str(self.path),
                error=str(error),
            )
        return make()

    def _make_and_keep(self, make: Callable[[], AlignedMemory]) -> AlignedMemory:
        content = make()
        try:
            self._write(content.view())
        except OSError as error:
            logger.warning("the cache cannot be written", path=str(self.path), error=str(error))
        return content

    def _read(self) -> AlignedMemory | None:
        """The content when it is there and whole."""
        try:
            with self.path.open("rb") as file:
                magic, size, digest = _HEADER.unpack(file.read(_HEADER_BYTES)[: _HEADER.size])
                if magic != _MAGIC or os.fstat(file.fileno()).st_size != _HEADER_BYTES + size:
                    raise ValueError("it is cut short")
                memory = AlignedMemory(size)
                if file.readinto(memory.view()) != size or xxhash.xxh3_64_intdigest(memory.view()) != digest:
                    raise ValueError("its digest is wrong")
                return memory
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            logger.warning("a file of the cache is damaged and is made again", path=str(self.path), error=str(error))
            return None

    def _write(self, content: memoryview) -> None:
        header = _HEADER.pack(_MAGIC, len(content), xxhash.xxh3_64_intdigest(content))
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(header.ljust(_HEADER_BYTES, b"\0"))
                file.write(content)
            os.chmod(name, 0o644)
            os.rename(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of this file, across processes."""
        lock = filelock.FileLock(f"{self.path}.lock")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            raise OSError(f"another process has held {self.path.name}.lock for too long") from error
        try:
            yield
        finally:
            lock.release()
