"""Which sequences get their next token in a step, and who gives up blocks when they run out. Torch-free.

    decoding ──needs a block, none free──> the sequence of the worst rank is preempted; when that is itself, it waits
    preempted: its blocks are gone; prompt and output are computed again later

The best-ranked sequence can take blocks from all others, so it always advances: there is no livelock. Waiting instead
of preempting itself keeps what was computed: blocks that nobody in the engine holds (reservations of intake, prompts
in transfer) come back by themselves.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice

from twinstage.engine.plan import ScheduledChunk
from twinstage.engine.prefill_scheduler import by_rank
from twinstage.engine.sequence import Sequence
from twinstage.errors import KvExhausted
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import blocks_for


@dataclass(slots=True, kw_only=True)
class DecodeDecision:
    """What `schedule` decided; `preempted` (blocks released) and `impossible` (blocks kept) are removed by the core."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    impossible: list[Sequence] = field(default_factory=list)


class DecodeScheduler:
    """The sequences whose known tokens are computed but for the last one."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_sequences: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_num_sequences = max_num_sequences
        self.decoding: list[Sequence] = []  # by rank; those beyond the batch keep their blocks and wait

    @property
    def has_work(self) -> bool:
        return bool(self.decoding)

    def add(self, sequence: Sequence) -> None:
        insort(self.decoding, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; its blocks are the caller's business."""
        if sequence in self.decoding:
            self.decoding.remove(sequence)

    def schedule(self, *, prefilling: list[Sequence]) -> DecodeDecision:
        """One token for each sequence of the batch: the best-ranked of those that decode and those in `prefilling`."""
        by_worst = list(merge(prefilling, self.decoding, key=by_rank))
        batch = list(islice(by_worst, self._max_num_sequences))
        computing = set(map(id, prefilling))
        decision = DecodeDecision()
        for sequence in batch:
            if id(sequence) in computing or sequence in decision.preempted:
                continue
            if self._blocks_of(sequence) > self._pool.num_blocks:
                decision.impossible.append(sequence)
            elif self._make_room(sequence, by_worst, decision):
                start = sequence.num_computed_tokens
                decision.chunks.append(ScheduledChunk(sequence=sequence, start=start, length=1, samples=True))
        return decision

    def _make_room(self, sequence: Sequence, by_worst: list[Sequence], decision: DecodeDecision) -> bool:
        """Own a block for the next token, at the cost of those at the end of `by_worst`; whether that succeeded."""
        missing = self._blocks_of(sequence) - len(sequence.table)
        if missing <= 0:
            return True
        try:
            sequence.table.grow(missing)
        except KvExhausted:
            return self._preempt_for(sequence, missing, by_worst=by_worst, decision=decision)
        return True

    def _preempt_for(
        self, sequence: Sequence, missing: int, *, by_worst: list[Sequence], decision: DecodeDecision
    ) -> bool:
        while by_worst[-1] is not sequence:
            victim = by_worst.pop()
            decision.preempted.append(victim)
            try:
                sequence.table.take_over(victim.table, missing)
            except KvExhausted:
                continue
            return True
        return False

    def _blocks_of(self, sequence: Sequence) -> int:
        """Blocks it owns once its next token is computed."""
        return blocks_for(sequence.num_computed_tokens + 1, block_size=self._block_size)
