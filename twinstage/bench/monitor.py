"""Whether the load generator keeps up: the CPU time it takes, and how late its event loop comes to a timer."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from twinstage.bench.histogram import DurationHistogram
from twinstage.bench.results import Distribution, GeneratorHealth

TICK_S = 0.02
BUSY_SHARE = 0.7  # of one core; above it, measured latencies contain the generator's own queue
_LAG_FLOOR_S = 0.010


class GeneratorMonitor:
    """Watches the event loop of the thread that enters it, while in scope."""

    def __init__(self) -> None:
        self._lag = DurationHistogram()
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._wall_s, self._thread_s, self._process_s = time.monotonic(), time.thread_time(), time.process_time()
        self._ticking = asyncio.create_task(self._tick(), name="generator monitor")
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    def health(self, start_delay: Distribution | None) -> GeneratorHealth:
        """What was seen so far. Must be called on the same thread."""
        wall_s = max(time.monotonic() - self._wall_s, 1e-9)
        return GeneratorHealth(
            loop_share=(time.thread_time() - self._thread_s) / wall_s,
            cpu_share=(time.process_time() - self._process_s) / wall_s,
            loop_lag=self._lag.distribution(),
            start_delay=start_delay,
        )

    async def _tick(self) -> None:
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag.add(max(0.0, time.monotonic() - due_s))


def generator_warnings(health: GeneratorHealth, itl: Distribution | None) -> list[str]:
    """What a reader must know of the generator before believing the figures."""
    warnings: list[str] = []
    if health.loop_share > BUSY_SHARE:
        warnings.append(
            f"the load generator itself was busy {health.loop_share:.0%} of the time, so it may be what limits the "
            "throughput and lengthens the latencies; use several generators, or less load"
        )
    lag_limit_s = max(_LAG_FLOOR_S, itl.p50_s * 0.1 if itl is not None else 0.0)
    if health.loop_lag is not None and health.loop_lag.p99_s > lag_limit_s:
        warnings.append(
            f"the load generator was held up by {health.loop_lag.p99_s * 1000:.0f} ms at the 99th percentile, which is "
            "part of the measured latencies; give it a core of its own"
        )
    return warnings
