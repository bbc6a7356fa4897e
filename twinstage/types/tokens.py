"""What workers produce: tokens, and why a generation ended."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from twinstage.types.basics import RequestId


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    TOOL_CALLS = "tool_calls"
    REPETITION = "repetition"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a generation; at most one of the two matches is set, and only with `STOP`."""

    reason: FinishReason
    matched_token_id: int | None = None
    matched_text: str | None = None


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probability (natural, before temperature and penalties) and rank (1 = most likely) of a produced token."""

    logprob: float
    rank: int
    top: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedToken:
    """A token that a worker sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities (natural) and ranks (1 = most likely) of consecutive prompt tokens, the first at `start`.

    As a prompt may have tens of thousands, all are flat arrays: of unsigned numbers ("I") and of floats ("f"). Of the
    most likely tokens at each position, best first, there are `count` for every token.
    """

    start: int
    token_ids: array[int]
    logprobs: array[float]
    ranks: array[int]
    top_ids: array[int]
    top_logprobs: array[float]

    @property
    def count(self) -> int:
        return len(self.top_ids) // len(self.token_ids) if self.token_ids else 0

    def tokens(self, first: int = 0, end: int | None = None) -> Iterator[ProducedToken]:
        """The tokens from index `first` up to `end`, one by one."""
        count = self.count
        for index in range(first, len(self.token_ids) if end is None else min(end, len(self.token_ids))):
            places = range(index * count, (index + 1) * count)
            top = tuple(TokenAlternative(self.top_ids[place], self.top_logprobs[place]) for place in places)
            logprobs = TokenLogprobs(logprob=self.logprobs[index], rank=self.ranks[index], top=top)
            yield ProducedToken(token_id=self.token_ids[index], logprobs=logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one choice of a request; `finish` is set when its generation ended with them.

    `choice_index` counts the choices of the request that was made of a worker, from 0.
    """

    request_id: RequestId
    tokens: tuple[ProducedToken, ...]
    finish: Finish | None = None
    choice_index: int = 0
