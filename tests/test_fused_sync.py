"""The barrier by which the threads of a step wait for one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from twinstage.models.fused.fields import SyncPlace
from twinstage.models.fused.intrinsics import load_i64, store_i64
from twinstage.models.fused.sync import barrier

pytestmark = pytest.mark.xdist_group("fused")
Passer = Callable[[int, int, int], int]


@pytest.fixture(scope="module")
def pass_barriers() -> Any:
    """A function that passes barriers `rounds` times and counts how often another thread was behind or ahead.

    Each thread writes the round into its own slot, 64 bytes apart, before a barrier, and reads the others' after it.
    """

    @numba.njit(nogil=True)
    def run(sync, slots, thread, num_threads, rounds):  # type: ignore[no-untyped-def]
        wrong = 0
        for turn in range(rounds):
            store_i64(slots + thread * 64, 0, turn)
            barrier(sync, num_threads)
            for other in range(num_threads):
                if load_i64(slots + other * 64, 0) != turn:
                    wrong += 1
            barrier(sync, num_threads)
        return wrong

    return run


def _shared(num_bytes: int) -> NDArray[np.int64]:
    return np.zeros(num_bytes // 8, np.int64)


def test_no_thread_passes_before_all_have_come(pass_barriers: Any) -> None:
    """More threads than any machine for tests has processors, so that they sleep, too."""
    num_threads, rounds = 12, 300
    sync, slots = _shared(SyncPlace.SEMAPHORES), _shared(64 * num_threads)
    wrong: list[int] = []

    def run(thread: int) -> None:
        wrong.append(pass_barriers(sync.ctypes.data, slots.ctypes.data, thread, num_threads, rounds))

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == [0] * num_threads
    assert sync[SyncPlace.ASLEEP // 8] == 0


def test_who_waits_long_uses_no_processor(pass_barriers: Any) -> None:
    sync, slots = _shared(SyncPlace.SEMAPHORES), _shared(128)
    pass_barriers(sync.ctypes.data, slots.ctypes.data, 0, 1, 1)  # compiles
    used_s: list[float] = []

    def wait() -> None:
        started_s = time.thread_time()
        pass_barriers(sync.ctypes.data, slots.ctypes.data, 0, 2, 1)
        used_s.append(time.thread_time() - started_s)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.5)
    pass_barriers(sync.ctypes.data, slots.ctypes.data, 1, 2, 1)
    waiter.join(timeout=20)
    assert used_s
    assert used_s[0] < 0.1
