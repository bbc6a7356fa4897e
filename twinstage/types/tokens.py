"""What workers produce: tokens, and why a generation ended."""

from __future__ import annotations

import enum
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
class TokenChunk:
    """New tokens of one choice of a request; `finish` is set when its generation ended with them.

    `choice_index` counts the choices of the request that was made of a worker, from 0.
    """

    request_id: RequestId
    tokens: tuple[ProducedToken, ...]
    finish: Finish | None = None
    choice_index: int = 0
