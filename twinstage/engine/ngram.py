"""Guesses from the sequence itself: what followed the last time that its last tokens occurred in it.

Cheap, and right where an answer repeats its prompt or itself: summaries, edits, code, lists.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.sequence import Sequence

Tokens = NDArray[np.int64]


class NgramDrafter:
    """Looks for the longest of the sequence's ends, `longest` to `shortest` tokens, that occurred before."""

    cost = 0.0

    def __init__(self, *, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._known: dict[Sequence, _Known] = {}

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """As the protocol says."""
        return [self._continuation(sequence, count) for sequence, count in wanted]

    def forget(self, sequence: Sequence) -> None:
        """As the protocol says."""
        self._known.pop(sequence, None)

    def _continuation(self, sequence: Sequence, count: int) -> list[int]:
        known = self._known.setdefault(sequence, _Known()).tokens_of(sequence)
        return find_continuation(known, count, longest=self._longest, shortest=self._shortest)


class _Known:
    """The tokens of a sequence as an array, to which new ones are added."""

    def __init__(self) -> None:
        self._tokens: Tokens = np.empty(0, dtype=np.int64)
        self._count = 0

    def tokens_of(self, sequence: Sequence) -> Tokens:
        count = sequence.num_tokens
        if count > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(1024, 2 * count))
        self._tokens[self._count : count] = sequence.token_ids_between(self._count, count)
        self._count = count
        return self._tokens[:count]


def find_continuation(known: Tokens, count: int, *, longest: int, shortest: int) -> list[int]:
    """At most `count` tokens that followed an earlier occurrence of the longest end of `known` that has one.

    Of several occurrences the last one counts that is followed by `count` tokens, else the one followed by most.
    """
    matches: Tokens = np.arange(len(known) - 1)  # places of an occurrence's last token
    found = None
    for size in range(1, longest + 1):
        matches = matches[matches >= size - 1]
        matches = matches[known[matches - (size - 1)] == known[-size]]
        if not len(matches):
            break
        if size >= shortest:
            found = matches
    if found is None:
        return []
    whole = found[found + count < len(known)]
    start = int(whole[-1] if len(whole) else found[0]) + 1
    continuation: list[int] = known[start : start + count].tolist()
    return continuation
