"""Which tokens may come next: one matcher for each sequence, fed with every token that the sequence gets.

BackendMatcher      what a backend gives: one grammar, text tokens only
SequenceMatcher     a whole output: reasoning, then the answer; and the tokens that end a generation
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import FieldViolation, InvalidRequest

Mask = NDArray[np.bool_]  # [tokens of the tokenizer, or of the model]

FIELD = "structured_output"
_MAX_MESSAGE_CHARACTERS = 300


class BackendMatcher(Protocol):
    """One grammar in one state. For one thread."""

    def allowed(self) -> Mask:
        """The tokens that may come next, without those that end the output. Raises InvalidRequest above a limit."""

    @property
    def may_end(self) -> bool:
        """Whether what was accepted so far is complete."""

    def accept(self, token_id: int) -> bool:
        """Take the next token. False, with nothing changed, when it may not come."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""

    def copy(self) -> Self:
        """Another one in the same state."""

    @property
    def memory_bytes(self) -> int:
        """About what the compiled grammar takes."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What a token did, for `rollback`: where the output stood before it, and which matcher took it."""

    in_reasoning: bool
    marked: int
    fed: bool


class SequenceMatcher:
    """What an output may go on with. For one thread.

    The output is reasoning up to a marker and then the answer, or the answer alone. Reasoning without a constraint may
    be anything that does not end the generation; under one, the marker follows where it may end. Where the answer may
    end, the tokens that end a generation are allowed, too; `is_over` where nothing else is, so that nobody needs to
    compute the next token.
    """

    def __init__(
        self, answer: BackendMatcher, *, marker: tuple[int, ...] = (), reasoning: BackendMatcher | None = None
    ) -> None:
        self._answer = answer
        self._marker = marker
        self._reasoning = reasoning
        self._in_reasoning = bool(marker)
        self._marked = 0  # leading tokens of the marker that the output ends with
        self._steps: list[_Step] = []
        self._allowed: Mask | None = None  # in the present state, once somebody asked

    @property
    def is_free(self) -> bool:
        """Whether any token may come that does not end the generation."""
        return self._in_reasoning and self._reasoning is None

    @property
    def may_end(self) -> bool:
        """Whether the generation may end here."""
        return not self._in_reasoning and self._answer.may_end

    @property
    def is_over(self) -> bool:
        """Whether nothing can be added to the output."""
        return self.may_end and not self._text_mask().any()

    def allowed(self, end_ids: Iterable[int], *, vocab_size: int) -> Mask:
        """Which of the tokens below `vocab_size` may come next; `end_ids` end the generation.

        Raises InvalidRequest when there is none, or the grammar is above a limit.
        """
        ends = [token_id for token_id in end_ids if token_id < vocab_size]
        if self.is_free:
            mask = np.ones(vocab_size, dtype=np.bool_)
            mask[ends] = False
        else:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            known = self._text_mask()[:vocab_size]
            mask[: len(known)] = known
            mask[ends] |= self.may_end
        if not mask.any():
            raise refused(f"allows no token of this model after {len(self._steps)} tokens of the output")
        return mask

    def accept(self, token_id: int) -> bool:
        """Take the next token, which does not end the generation. False, with nothing changed, when it may not come."""
        step = _Step(self._in_reasoning, self._marked, fed=False)
        if not self._in_reasoning:
            if not self._answer.accept(token_id):
                return False
            step = _Step(in_reasoning=False, marked=0, fed=True)
        elif self._reasoning is None:
            self._marked = self._longest_marked(token_id)
        elif self._begins_or_continues_marker(token_id):
            self._marked += 1
        elif self._marked or not self._reasoning.accept(token_id):
            return False
        else:
            step = _Step(in_reasoning=True, marked=0, fed=True)
        if self._in_reasoning and self._marked == len(self._marker):
            self._in_reasoning, self._marked = False, 0
        self._steps.append(step)
        self._allowed = None
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        for _ in range(count):
            step = self._steps.pop()
            if step.fed:
                matcher = self._reasoning if step.in_reasoning else self._answer
                assert matcher is not None
                matcher.rollback(1)
            self._in_reasoning, self._marked = step.in_reasoning, step.marked
        self._allowed = None

    def copy(self) -> SequenceMatcher:
        """Another one in the same state."""
        reasoning = self._reasoning.copy() if self._reasoning is not None else None
        other = SequenceMatcher(self._answer.copy(), marker=self._marker, reasoning=reasoning)
        other._in_reasoning, other._marked, other._steps = self._in_reasoning, self._marked, list(self._steps)
        return other

    def _text_mask(self) -> Mask:
        """The tokens that may come next and do not end the generation."""
        if self._allowed is None:
            self._allowed = self._compute_text_mask()
        return self._allowed

    def _compute_text_mask(self) -> Mask:
        if not self._in_reasoning:
            return self._answer.allowed()
        assert self._reasoning is not None
        mask = self._reasoning.allowed()
        if self._marked:
            mask[:] = False
        if self._marked or self._reasoning.may_end:
            mask[self._marker[self._marked]] = True
        return mask

    def _begins_or_continues_marker(self, token_id: int) -> bool:
        """Under a constraint: a token may both go on with the reasoning and begin the marker; then it begins it."""
        assert self._reasoning is not None
        return token_id == self._marker[self._marked] and (self._marked > 0 or self._reasoning.may_end)

    def _longest_marked(self, token_id: int) -> int:
        """How many leading tokens of the marker free reasoning ends with, after `token_id`."""
        end = (*self._marker[: self._marked], token_id)
        return next(size for size in range(len(end), -1, -1) if end[len(end) - size :] == self._marker[:size])


def shortened(message: str) -> str:
    """A library's message, in one line and of a length that fits into a status."""
    return re.sub(r"\s+", " ", message.replace("<non-verbose/>", "")).strip()[:_MAX_MESSAGE_CHARACTERS]


def refused(description: str) -> InvalidRequest:
    """What a request is told whose constraint cannot be met."""
    return InvalidRequest([FieldViolation(FIELD, description)])
