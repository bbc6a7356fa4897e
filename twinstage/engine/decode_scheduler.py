"""Which sequences get their next token in a step, and who gives up blocks when they run out. Torch-free.

    decoding ──needs a block, none free──> those of worse rank that free one are preempted, the worst first
             └──they free none──> it waits
    preempted: its blocks are gone; prompt and output are computed again later

Releasing a sequence frees only what nobody else holds: one whose blocks are all shared is not preempted in vain.
The best-ranked sequence can take blocks from all others, so it advances, unless all that it lacks is held outside of
the engine (reservations of intake, prompts in transfer), and that comes back by itself: there is no livelock. Waiting
instead of preempting keeps what was computed.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, takewhile

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
        ranked = list(merge(prefilling, self.decoding, key=by_rank))
        batch = list(islice(ranked, self._max_num_sequences))
        computing = set(map(id, prefilling))
        decision = DecodeDecision()
        for sequence in batch:
            if id(sequence) in computing or sequence in decision.preempted:
                continue
            if self._blocks_of(sequence) > self._pool.num_blocks:
                decision.impossible.append(sequence)
            elif self._make_room(sequence, ranked, decision):
                start = sequence.num_computed_tokens
                decision.chunks.append(ScheduledChunk(sequence=sequence, start=start, length=1, samples=True))
        return decision

    def _make_room(self, sequence: Sequence, ranked: list[Sequence], decision: DecodeDecision) -> bool:
        """Own a block for the next token, at the cost of those after it in `ranked`; whether that succeeded."""
        missing = self._blocks_of(sequence) - len(sequence.table)
        if missing <= 0:
            return True
        try:
            sequence.table.grow(missing)
        except KvExhausted:
            return self._preempt_for(sequence, missing, ranked=ranked, decision=decision)
        return True

    def _preempt_for(
        self, sequence: Sequence, missing: int, *, ranked: list[Sequence], decision: DecodeDecision
    ) -> bool:
        worse = takewhile(lambda other: other is not sequence, reversed(ranked))
        by_table = {id(other.table): other for other in worse if other not in decision.preempted}
        try:
            released = sequence.table.take_over([other.table for other in by_table.values()], missing)
        except KvExhausted:
            return False
        decision.preempted += [by_table[id(table)] for table in released]
        return True

    def _blocks_of(self, sequence: Sequence) -> int:
        """Blocks it owns once its next token is computed."""
        return blocks_for(sequence.num_computed_tokens + 1, block_size=self._block_size)
