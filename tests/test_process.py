"""What a process does once it has started: memory goes back, and the garbage collector leaves the libraries alone."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.config import DecodeSettings
from twinstage.rpc.worker_process import WorkerProcess

ROOT = Path(__file__).resolve().parent.parent

# Small pieces between which single ones stay: freed, they do not go back by themselves.
LEFTOVERS = """
import ctypes
from twinstage.telemetry.process import settle_after_start

def anonymous_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:"))

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(16384) for _ in range(4000)]
for piece in pieces:
    ctypes.memset(piece, 1, 16384)
for piece in pieces[:-1]:
    libc.free(piece)
before = anonymous_kib()
settle_after_start()
print(before - anonymous_kib())
"""

ROUTER = """
import asyncio, gc, os, signal
from router.__main__ import Router
from router.config import RouterSettings
from twinstage.settings import read_settings

async def main():
    settings = read_settings(RouterSettings, ["--listen", "127.0.0.1:0", "--workers", "127.0.0.1:1"])
    router = asyncio.create_task(Router(settings).run())
    async with asyncio.timeout(60):
        while not gc.get_freeze_count():
            await asyncio.sleep(0.02)
    print("objects frozen:", gc.get_freeze_count())
    await asyncio.sleep(0.1)  # until it listens to signals
    os.kill(os.getpid(), signal.SIGTERM)
    await router

asyncio.run(main())
"""


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_memory_that_the_start_freed_goes_back() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LEFTOVERS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(result.stdout) > 40_000  # of 64,000


@pytest.mark.usefixtures("thawed")
async def test_a_worker_settles_once_it_has_loaded() -> None:
    """The collector no longer sees what the start made, and still finds what comes after it."""
    counts: list[int] = []

    def load() -> Any:
        counts.append(gc.get_freeze_count())
        return lambda _loop: None

    process = WorkerProcess[Any](DecodeSettings(), service_name="", add_services=lambda *_: None, load=load)
    await process._load_unless_signalled()
    assert gc.get_freeze_count() > counts[0] + 1000
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1


def test_a_router_settles_once_it_has_started() -> None:
    result = subprocess.run(
        [sys.executable, "-c", ROUTER], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    frozen = re.search(r"^objects frozen: (\d+)$", result.stdout, re.MULTILINE)
    assert frozen is not None
    assert int(frozen[1]) > 1000
