"""From what a step shall compute to the tensors of one forward pass."""

from __future__ import annotations

from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.models.batch import PagedBatch, PagedChunk, make_batch


def batch_of_plan(plan: StepPlan, *, block_size: int) -> PagedBatch:
    """Lay out the chunks of `plan`, in their order, for blocks of `block_size` tokens."""
    return make_batch([paged_chunk(chunk) for chunk in plan.chunks], block_size=block_size)


def paged_chunk(chunk: ScheduledChunk, turn: int | None = None) -> PagedChunk:
    """`chunk` for a forward pass; with `turn`, only the token at that place in it."""
    start, end = (chunk.start, chunk.end) if turn is None else (chunk.start + turn, chunk.start + turn + 1)
    return PagedChunk(
        token_ids=chunk.sequence.token_ids_between(start, end),
        start=start,
        block_ids=chunk.sequence.table.block_ids,
        samples=chunk.samples and end == chunk.end,
    )
