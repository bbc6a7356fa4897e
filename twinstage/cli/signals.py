"""Signals of a command that owns a cluster: the first one ends it in order, the second one at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from twinstage.cli.cluster import Cluster

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Interruption:
    """What else the first signal interrupts, besides the cluster's wait. Called on a thread."""

    also: Callable[[], None] | None = None


@contextmanager
def stopped_by_signals(cluster: Cluster) -> Iterator[Interruption]:
    """While in scope, SIGINT, SIGTERM or SIGHUP interrupts the cluster's wait; another one kills every process.

    A thread acts on them. Python's own handlers run when the main thread executes its next instruction, and that may
    never come: a signal in the moment before the main thread begins to wait does not end the wait.
    """
    interruption = Interruption()

    def act(arrived: socket.socket) -> None:
        numbers = iter(lambda: arrived.recv(1), b"")
        if not next(numbers, None):
            return
        cluster.interrupt()
        if interruption.also is not None:
            interruption.also()
        if number := next(numbers, None):
            cluster.kill()
            os._exit(128 + number[0])

    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    thread = Thread(target=act, args=(receiving,), name="signals", daemon=True)
    thread.start()
    with receiving:
        try:
            with sending:
                previous_fd = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
                previous = {number: signal.signal(number, lambda *_: None) for number in _STOPPING}
                try:
                    yield interruption
                finally:
                    for number, handler in previous.items():
                        signal.signal(number, handler)
                    signal.set_wakeup_fd(previous_fd)
        finally:
            thread.join()  # it ends with the sending end, and not before it may the receiving one be closed
