"""Finding that a generation repeats itself: its last tokens are one pattern, again and again."""

from __future__ import annotations

from collections import deque

from twinstage.types import RepetitionLimits


class RepetitionDetector:
    """Watches the tokens of one continuation.

    A pattern of `size` tokens stands there `count` times exactly if each of the last `size * (count - 1)` tokens is
    equal to the one `size` places before it. So for each size it is enough to know how long that has been the case, and
    only sizes at which the newest token occurred before can go on: a token costs as many steps as it has earlier
    occurrences among the last `max_pattern_size` tokens.
    """

    def __init__(self, limits: RepetitionLimits) -> None:
        self._limits = limits
        self._num_tokens = 0
        self._places: dict[int, deque[int]] = {}  # by token id: its last occurrences, the earliest first
        self._runs: dict[int, int] = {}  # by size: newest tokens in a row that are equal to the one so far before

    def push(self, token_id: int) -> bool:
        """Take the next token; whether the tokens so far end with a repetition."""
        limits, place = self._limits, self._num_tokens
        self._num_tokens += 1
        earlier = self._places.get(token_id)
        if earlier is None:
            self._places[token_id] = deque((place,))
            self._runs = {}
            return False
        while earlier and place - earlier[0] > limits.max_pattern_size:
            earlier.popleft()
        sizes = [place - other for other in earlier if place - other >= limits.min_pattern_size]
        earlier.append(place)
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes}
        return any(run >= size * (limits.min_count - 1) for size, run in self._runs.items())
