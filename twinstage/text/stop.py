"""Stop strings, matched on streamed text across the borders of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may go out, and the stop string that ended it, if any."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Finds the stop string that is complete first; of several that end together, the longest.

    Text that may be the beginning of a stop string is held back until it is known. The result does not depend on how
    the text was cut into pieces.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take the next piece; return what may go out. After a match nothing more may be pushed."""
        if not self._stop:
            return StopResult(text)
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            start, matched = match
            self._held = ""
            return StopResult(pending[: start + len(matched)] if self._include_in_output else pending[:start], matched)
        safe = self._start_of_possible_match(pending)
        self._held = pending[safe:]
        return StopResult(pending[:safe])

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Start and string of the match that ends first, and of those the longest."""
        found = ((text.find(stop), stop) for stop in self._stop)
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _start_of_possible_match(self, text: str) -> int:
        """Index from which the text is the beginning of a stop string; its length when there is none."""
        return min(_start_of_prefix(text, stop) for stop in self._stop)


def _start_of_prefix(text: str, stop: str) -> int:
    """Index of the longest end of `text` that begins `stop`; the text's length when there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
