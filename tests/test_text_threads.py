"""TokenizerService's threads: a short queue, in which abandoned work counts until it has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from router.text_threads import MAX_PENDING_PER_THREAD, TextThreads
from twinstage.errors import Overloaded


async def test_results_and_errors_come_back() -> None:
    threads = TextThreads(1)
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_work_whose_caller_has_left_counts_until_it_has_ended() -> None:
    threads = TextThreads(1)
    release = threading.Event()
    calls = [asyncio.create_task(threads.run(release.wait)) for _ in range(MAX_PENDING_PER_THREAD)]
    await asyncio.sleep(0)
    calls[0].cancel()  # it runs: a thread cannot be stopped
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    with pytest.raises(Overloaded):
        await threads.run(lambda: None)
    release.set()
    await asyncio.gather(*calls[1:])
    assert await threads.run(lambda: 1) == 1
    threads.close()
