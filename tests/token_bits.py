"""Tokens with their log probabilities, comparable bit by bit: as an engine made them, and as a client receives them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from twinstage.types import ProducedToken
from twinstage.v1 import common_pb2

# id, log probability, rank, and the ids and log probabilities of the alternatives; float32, as they travel
TokenBits = tuple[int, np.float32, int, tuple[tuple[int, np.float32], ...]]


def bits_of_produced(tokens: Iterable[ProducedToken]) -> list[TokenBits]:
    """Of an engine's tokens, which must have log probabilities."""
    bits = []
    for token in tokens:
        assert token.logprobs is not None
        top = tuple((entry.token_id, np.float32(entry.logprob)) for entry in token.logprobs.top)
        bits.append((token.token_id, np.float32(token.logprobs.logprob), token.logprobs.rank, top))
    return bits


def bits_of_received(logprobs: Iterable[common_pb2.TokenLogprob]) -> list[TokenBits]:
    """Of the entries of a response."""
    return [
        (
            entry.token_id,
            np.float32(entry.logprob),
            entry.rank,
            tuple((other.token_id, np.float32(other.logprob)) for other in entry.top),
        )
        for entry in logprobs
    ]
