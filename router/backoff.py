"""Waiting longer and longer between attempts to reach something."""

from __future__ import annotations

import asyncio
import random

FIRST_S, LONGEST_S, FACTOR = 0.1, 2.0, 1.6
JITTER = 0.2  # share by which waits differ, so that many routers do not come at once


class Backoff:
    """The pauses between attempts; `reset` after a success."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        self._next_s = FIRST_S

    async def wait(self) -> None:
        pause_s, self._next_s = self._next_s, min(self._next_s * FACTOR, LONGEST_S)
        await asyncio.sleep(pause_s * random.uniform(1 - JITTER, 1 + JITTER))
