"""Positions of tokens as BERT and its kin number them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from twinstage.types import PoolingInput


def position_ids(inputs: Sequence[PoolingInput], padding_id: int | None) -> list[int]:
    """Of the tokens of all inputs, one input after the other.

    BERT counts from 0. RoBERTa numbers from behind the padding's id, and leaves padding out; `padding_id` is None for
    BERT.
    """
    positions: list[int] = []
    for entry in inputs:
        if padding_id is None:
            positions.extend(range(len(entry.token_ids)))
            continue
        counts = accumulate(token_id != padding_id for token_id in entry.token_ids)
        positions.extend(
            padding_id + count if token_id != padding_id else padding_id
            for token_id, count in zip(entry.token_ids, counts, strict=True)
        )
    return positions
