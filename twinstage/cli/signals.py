"""Signals of a command that owns a cluster: the first one ends it in order, the second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from twinstage.cli.cluster import Cluster

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Interruption:
    """What else the first signal interrupts, besides the cluster's wait."""

    also: Callable[[], None] | None = None


@contextmanager
def stopped_by_signals(cluster: Cluster) -> Iterator[Interruption]:
    """While in scope, SIGINT, SIGTERM or SIGHUP interrupts the cluster's wait; another one kills every process."""
    received: list[int] = []
    interruption = Interruption()

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            cluster.interrupt()
            if interruption.also is not None:
                interruption.also()
            return
        cluster.kill()
        os._exit(128 + number)

    previous = {number: signal.signal(number, handle) for number in _STOPPING}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
