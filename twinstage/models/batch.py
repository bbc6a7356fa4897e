"""What one forward pass computes: tokens of several sequences in one row, and where their keys and values live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedChunk:
    """Consecutive tokens of one sequence, the first at position `start`.

    `block_ids` are the sequence's blocks in order; they hold the keys and values of positions `0 .. start - 1` and have
    room for these. Of the last `num_logits` tokens the logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """The chunks of one pass as tensors, all int64; the tokens of the chunks follow one another without padding."""

    chunks: tuple[PagedChunk, ...]
    token_ids: torch.Tensor  # [num_tokens]
    position_ids: torch.Tensor  # [num_tokens], within the sequence
    block_ids: torch.Tensor  # [num_tokens], the block of each token
    offsets: torch.Tensor  # [num_tokens], its place in that block
    sampled_rows: torch.Tensor  # [num_logits of all chunks], indices into the tokens
    block_size: int


def make_batch(chunks: Sequence[PagedChunk], *, block_size: int) -> PagedBatch:
    """Lay out chunks for a forward pass. Each must have blocks for all of its tokens (IndexError otherwise)."""
    token_ids: list[int] = []
    position_ids: list[int] = []
    block_ids: list[int] = []
    sampled_rows: list[int] = []
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
        position_ids.extend(range(chunk.start, chunk.end))
        block_ids.extend(chunk.block_ids[position // block_size] for position in range(chunk.start, chunk.end))
        sampled_rows.extend(range(len(token_ids) - chunk.num_logits, len(token_ids)))
    positions = torch.tensor(position_ids, dtype=torch.int64)
    return PagedBatch(
        chunks=tuple(chunks),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        position_ids=positions,
        block_ids=torch.tensor(block_ids, dtype=torch.int64),
        offsets=positions % block_size,
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64),
        block_size=block_size,
    )
