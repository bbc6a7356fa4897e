"""From what a step shall compute to the tensors of one forward pass."""

from __future__ import annotations

from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.models.batch import PagedBatch, PagedChunk, make_batch


def batch_of_plan(plan: StepPlan, *, block_size: int) -> PagedBatch:
    """Lay out the chunks of `plan`, in their order, for blocks of `block_size` tokens."""
    return make_batch([paged_chunk(chunk) for chunk in plan.chunks], block_size=block_size)


def paged_chunk(chunk: ScheduledChunk, turn: int | None = None) -> PagedChunk:
    """`chunk` for a forward pass; with `turn`, only the token at that place in it."""
    if turn is None:
        return _paged(chunk, chunk.token_ids, start=chunk.start, num_logits=chunk.num_logits)
    gives_logits = turn >= chunk.length - chunk.num_logits
    return _paged(chunk, [chunk.token_ids[turn]], start=chunk.start + turn, num_logits=int(gives_logits))


def _paged(chunk: ScheduledChunk, token_ids: list[int], *, start: int, num_logits: int) -> PagedChunk:
    block_ids = chunk.sequence.table.block_ids
    return PagedChunk(token_ids=token_ids, start=start, block_ids=block_ids, num_logits=num_logits)
