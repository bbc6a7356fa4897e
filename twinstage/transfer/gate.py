"""The gate before a transfer's blocks: once it is shut, nothing is written behind it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class WriteGate:
    """Lets one writer in at a time until it is shut, for good. Inside, a writer must not wait for anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shut = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """A scope in which the blocks may be written, if it yields True."""
        with self._lock:
            yield not self._shut

    def shut(self) -> None:
        """Shut the gate. When this returns, no writer is inside and none gets in: it waits for at most one read."""
        with self._lock:
            self._shut = True
