"""The door of a worker: whether it takes new requests."""

from __future__ import annotations

from twinstage.errors import Draining


class Door:
    """Open at first. Who closed it may open it again, unless it was closed for good: the process ends.

    A worker whose door is closed drains: it finishes what it has.
    """

    def __init__(self, worker: str) -> None:
        """`worker` is what the error messages call it."""
        self._worker = worker
        self._is_closed = False
        self._is_for_good = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_closed_for_good(self) -> bool:
        return self._is_for_good

    def close(self, *, for_good: bool = False) -> None:
        """Let nothing new in. Idempotent."""
        self._is_closed = True
        self._is_for_good |= for_good

    def open(self) -> None:
        """Let requests in again. Raises Draining when the door was closed for good."""
        if self._is_for_good:
            raise self.refusal()
        self._is_closed = False

    def enter(self) -> None:
        """Raises Draining when the door is closed."""
        if self._is_closed:
            raise self.refusal()

    def refusal(self) -> Draining:
        """What those are told who are not let in."""
        what = "is shutting down" if self._is_for_good else "is draining: it finishes what it has"
        return Draining(f"this {self._worker} {what}")
