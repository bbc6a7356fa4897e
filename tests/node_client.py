"""Runs the Node.js client of tests/node_client: a gRPC implementation that shares no code with ours.

    answer = stream_answer("127.0.0.1:50051", {"prompt": "Hello"})
    answer["text"], answer["status"]["name"]

Its packages are installed once per machine and lock file into a folder of the temporary directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

SOURCE = Path(__file__).resolve().parent / "node_client"
PROTOS = SOURCE.parent.parent / "protos"
INSTALL_TIMEOUT_S = 150.0
NETWORK_ERRORS = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ENOTCACHED")


def stream_answer(address: str, request: Mapping[str, Any], *, deadline_s: float = 60.0) -> dict[str, Any]:
    """Stream one answer and return what the client printed; see stream_answer.js.

    Skips the test, in so many words, where node or npm is absent or the packages cannot be fetched.
    """
    node, modules = require_program("node"), install()
    result = subprocess.run(
        [node, str(SOURCE / "stream_answer.js"), address, str(PROTOS), json.dumps(request), str(deadline_s)],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=deadline_s + 30.0,
        check=False,
    )
    assert result.returncode == 0, f"stream_answer.js failed: {result.stderr}"
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def require_program(name: str) -> str:
    """The path of a program; skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; the Node.js client was not tried")
    return path


def install() -> Path:
    """Install the pinned packages, unless that was done before, and return the folder `node_modules`."""
    npm = require_program("npm")
    files = [SOURCE / "package.json", SOURCE / "package-lock.json"]
    key = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"twinstage-node-client-{os.getuid()}-{key}"
    with FileLock(f"{folder}.lock", timeout=INSTALL_TIMEOUT_S + 30.0):
        if not folder.exists():
            _install_into(folder, npm, files)
    return folder / "node_modules"


def _install_into(folder: Path, npm: str, files: list[Path]) -> None:
    """Fill a folder beside `folder` and rename it, so that an interrupted installation is never taken for one."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as unfinished:
        for file in files:
            shutil.copy(file, unfinished)
        result = subprocess.run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
            cwd=unfinished,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0 and any(word in result.stderr for word in NETWORK_ERRORS):
            pytest.skip(f"npm cannot reach its registry; the Node.js client was not tried: {result.stderr[-500:]}")
        assert result.returncode == 0, f"npm ci failed: {result.stderr}"
        complete = Path(unfinished) / "complete"
        complete.mkdir()
        (Path(unfinished) / "node_modules").rename(complete / "node_modules")
        complete.rename(folder)
