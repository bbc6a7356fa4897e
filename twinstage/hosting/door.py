"""The door of a worker: whether it takes new requests."""

from __future__ import annotations

from twinstage.errors import Draining


class Door:
    """Open at first. Who closed it may open it again, unless it was closed for a fault, or for good: the process ends.

    A worker whose door is closed drains: it finishes what it has.
    """

    def __init__(self, worker: str) -> None:
        """`worker` is what the error messages call it."""
        self._worker = worker
        self._is_closed = False
        self._is_for_good = False
        self._fault = ""

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_closed_for_good(self) -> bool:
        return self._is_for_good

    def close(self, *, for_good: bool = False, fault: str = "") -> None:
        """Let nothing new in. Idempotent. `fault` says what is wrong with the worker, which only a restart mends."""
        self._is_closed = True
        self._is_for_good |= for_good
        self._fault = self._fault or fault

    def open(self) -> None:
        """Let requests in again. Raises Draining when the door was closed for good or for a fault."""
        if self._is_for_good or self._fault:
            raise self.refusal()
        self._is_closed = False

    def enter(self) -> None:
        """Raises Draining when the door is closed."""
        if self._is_closed:
            raise self.refusal()

    def refusal(self) -> Draining:
        """What those are told who are not let in."""
        if self._is_for_good:
            what = "is shutting down"
        elif self._fault:
            what = f"takes nothing new until it is restarted: {self._fault}"
        else:
            what = "is draining: it finishes what it has"
        return Draining(f"this {self._worker} {what}")
