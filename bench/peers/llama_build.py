"""Builds llama.cpp's own server, which the Python package leaves out, from the sources that the package carries.

So both are the same llama.cpp. (The package's Python server answers one request at a time.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # it would be downloaded
    "LLAMA_OPENSSL": "OFF",
}


def build_llama_server(environment: Path, requirement: str, *, log: BinaryIO, limit_s: float) -> None:
    """Put `llama-server` into `environment/bin`, which has cmake and ninja.

    `requirement` is the exact version of the package, such as llama-cpp-python==1.2.3. Raises OSError,
    subprocess.SubprocessError, or LookupError when the package is not made as expected.
    """
    binaries = environment / "bin"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, timeout=limit_s, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    with tempfile.TemporaryDirectory(prefix="llama-build-", dir=environment) as directory:
        work = Path(directory)
        package = requirement.partition("==")[0]
        run(
            str(binaries / "python"),
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            package,
            "--dest",
            str(work),
            requirement,
        )
        archive = _only(sorted(work.glob("*.tar.gz")))
        with tarfile.open(archive) as sources:
            sources.extractall(work, filter="data")
        root = _only(sorted(work.glob("*/vendor/llama.cpp")))
        build = work / "build"
        options = [f"-D{name}={value}" for name, value in _OPTIONS.items()]
        ninja = f"-DCMAKE_MAKE_PROGRAM={binaries / 'ninja'}"
        run(str(binaries / "cmake"), "-S", str(root), "-B", str(build), "-G", "Ninja", ninja, *options)
        jobs = str(len(os.sched_getaffinity(0)))
        run(str(binaries / "cmake"), "--build", str(build), "--target", "llama-server", "--parallel", jobs)
        shutil.copy2(build / "bin" / "llama-server", binaries / "llama-server")


def _only(found: Sequence[Path]) -> Path:
    if len(found) != 1:
        raise LookupError(f"expected one file, found {[str(path) for path in found]}")
    return found[0]
