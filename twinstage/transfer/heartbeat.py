"""Signs of life on a connection of the KV channel, while a transfer is under way.

The sender says several times within the time that either end may be silent that it is alive, and the receiver answers.
So each end notices within that time that the other one is stopped or cut off, whatever else watches over it. Without
transfers both may be silent as long as they like: nobody waits for anything then.
"""

from __future__ import annotations

import time

from twinstage.errors import TransferError

INTERVALS = 4  # within the time of silence


class Heartbeat:
    """The sender's clock of one connection. `heard` may be called from another thread than the rest.

    It counts beats and not seconds: should this process itself have been held up, that costs one of them, and what has
    arrived meanwhile is heard before the next.
    """

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: how long the receiver may say nothing."""
        self._silence_s = silence_s
        self._next_s: float | None = None  # reading of the monotonic clock; None: no transfer is under way
        self._unanswered = 0

    @property
    def next_s(self) -> float:
        """When to look again."""
        return time.monotonic() + self._silence_s / INTERVALS if self._next_s is None else self._next_s

    def heard(self) -> None:
        """The receiver said something."""
        self._unanswered = 0

    def is_due(self, *, is_needed: bool) -> bool:
        """Whether to say now that this end is alive, `is_needed` while a transfer is under way.

        Raises TransferError when the other end no longer is.
        """
        now_s, next_s = time.monotonic(), self._next_s
        if not is_needed:
            self._next_s = None
        elif next_s is None or now_s >= next_s:
            self._next_s = now_s + self._silence_s / INTERVALS
        if not is_needed or next_s is None or now_s < next_s:
            return False
        if self._unanswered >= INTERVALS - 1:
            raise TransferError(f"the decode worker was silent for {self._silence_s:g} s")
        self._unanswered += 1
        return True
