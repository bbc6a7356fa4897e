"""GGUF files made into model directories, once, in the cache.

A converted model lies in `<cache>/gguf/<name>-<key>`, where the key covers the content of the file and the versions of
everything that took part, so a stale one is never found. It is written beside its place and moved there when it is
whole; a lock file lets one process convert while others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from twinstage.errors import ModelError
from twinstage.models import apart
from twinstage.models.weight_files import check_weights

CONVERTER_VERSION = 1  # raise it whenever the same file would give other weights, tokens or settings
_CONVERT_TIMEOUT_S = 1800.0
_MAGIC = b"GGUF"
_INVOLVED_PACKAGES = ("transformers", "gguf", "tokenizers")


def prepare_gguf(
    path: Path, *, source_fingerprint: str, cache_directory: Path, progress: Callable[[str], None]
) -> Path:
    """The directory of the converted model, converting it when it is not in the cache yet.

    Raises ModelError when the file is not a whole GGUF file of a known architecture, or the cache cannot be written.
    """
    target = cache_directory / "gguf" / f"{path.stem}-{_cache_key(source_fingerprint)}"
    if _is_complete(target):
        return target
    _check_magic(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if not _is_complete(target):
                _convert_into(target, path, progress)
    except OSError as error:
        raise ModelError(
            f"the converted model cannot be written to {target.parent} ({error}); free some space or choose another "
            "cache directory ($TWINSTAGE_CACHE)"
        ) from error
    return target


def _cache_key(source_fingerprint: str) -> str:
    versions = [f"{package}={importlib.metadata.version(package)}" for package in _INVOLVED_PACKAGES]
    return hashlib.sha256(f"{CONVERTER_VERSION};{source_fingerprint};{versions}".encode()).hexdigest()[:16]


def _is_complete(directory: Path) -> bool:
    """Whether `directory` holds a whole converted model (a power failure may have cut one short)."""
    if not (directory / "tokenizer.json").is_file():
        return False
    try:
        check_weights(directory)
    except ModelError:
        return False
    return True


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it begins with {magic!r})")


@contextlib.contextmanager
def _locked(target: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one converted model, across processes."""
    lock = filelock.FileLock(f"{target}.lock")
    try:
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            progress(f"waiting for another process that converts {target.name}")
            lock.acquire(timeout=_CONVERT_TIMEOUT_S)
    except filelock.Timeout as error:
        raise ModelError(f"another process has been converting {target.name} for too long; end it") from error
    try:
        yield
    finally:
        lock.release()


def _convert_into(target: Path, path: Path, progress: Callable[[str], None]) -> None:
    """Convert into a directory beside `target` and move it there. The caller holds the lock."""
    for leftover in [target, *target.parent.glob(f".{target.name}-*")]:  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    working = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(path, working, progress)
        for entry in (working, *working.iterdir()):  # made for this user alone
            entry.chmod(0o755 if entry.is_dir() else 0o644)
        os.rename(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    progress(f"converted model kept in {target}")


def _convert(path: Path, directory: Path, progress: Callable[[str], None]) -> None:
    if apart.is_worth_it():
        arguments = {"path": str(path.absolute()), "directory": str(directory.absolute())}
        apart.make_apart("convert_gguf", arguments, what=f"{path} cannot be converted", progress=progress)
        return
    # Transformers and torch take seconds to import, which a model that is in the cache need not pay here.
    from twinstage.models.convert_gguf import convert_gguf

    convert_gguf(path, directory, progress=progress)
