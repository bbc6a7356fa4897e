"""Stops processes while others are measured: what waits may still spin, on the cores that the others need."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Pausable(Protocol):
    """Something that can be stopped for a while."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@contextmanager
def awake(process: Pausable) -> Iterator[None]:
    """Let a stopped process run for as long as the scope lasts."""
    process.resume()
    try:
        yield
    finally:
        process.pause()


def pause_group(group: int) -> None:
    """Stop all processes of a group. Nothing happens when there are none any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)


def resume_group(group: int) -> None:
    """Let all processes of a group go on. Nothing happens when there are none any more."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)
