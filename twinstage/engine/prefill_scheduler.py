"""Which prompts are computed in a step. Torch-free.

    waiting ──admit: all blocks of the known tokens──> prefilling ──last chunk──> (left to the core)

A sequence gets all blocks of its prompt at once, those of a known beginning among them, so two half-computed prompts
can never wait for each other. Admission is by rank. Where sequences do not stay to decode, one that waits for more
blocks than are free lets smaller ones pass, until those have had as many as it wants itself; elsewhere nobody
overtakes. So none waits forever. A prompt of several chunks lets those of its priority pass whose rest is one chunk,
every other step: they wait for one of its chunks and not for all, and it takes twice as long at most.

Chunks end at fixed places, multiples of the chunk size, whatever else is in the step: a chunk is taken whole or not at
all. What a prompt is computed with then does not depend on its neighbours. With `fixed_passes` a chunk ends at the end
of the prompt, too, and the output tokens after it (of a preempted or resumed sequence) come in short ones, as they are
computed one by one (`engine/fixed_passes.py`). Where the prompt's own log probabilities are wanted, chunks are short:
each of their tokens gives a row of logits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from twinstage.engine.plan import ScheduledChunk
from twinstage.engine.prefix_cache import PrefixCache
from twinstage.engine.sequence import Sequence
from twinstage.errors import KvExhausted
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import blocks_for
from twinstage.kv.shortage import Shortage

by_rank = attrgetter("rank")

SCORED_PER_STEP = 64  # prompt tokens with logits, of all sequences: each has 4 bytes for every token of the vocabulary
MAX_PASSED = 8  # sequences that wait for blocks beside which others are looked at
REPLAYED_PER_STEP = 8  # output tokens of a sequence; each takes about as long as a decode step


class PrefillScheduler:
    """The sequences that wait for their prompt (for a preempted one: all its tokens) to be computed."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        chunk_size: int,
        max_num_sequences: int,
        decodes_here: bool,
        prefix_cache: PrefixCache | None = None,
        fixed_passes: bool = False,
    ) -> None:
        self._pool = pool
        self._fixed_passes = fixed_passes
        self._decodes_here = decodes_here
        self._block_size = block_size
        self._chunk_size = chunk_size  # tokens, also the most prompt tokens of a step
        self._max_num_sequences = max_num_sequences
        self._prefix_cache = prefix_cache or PrefixCache(None, block_size=block_size)
        self.waiting: list[Sequence] = []  # by rank; without blocks
        self.prefilling: list[Sequence] = []  # by rank; with blocks for all known tokens
        self._went_first: Sequence | None = None  # in the last step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling)

    @property
    def num_uncomputed_tokens(self) -> int:
        return sum(sequence.num_uncomputed_tokens for sequence in (*self.waiting, *self.prefilling))

    @property
    def wanted_blocks(self) -> int:
        """Blocks that the next sequence to be admitted needs; 0 when none waits."""
        return self._blocks_of(self.waiting[0]) if self.waiting else 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=by_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its blocks are the caller's business."""
        for sequences in (self.waiting, self.prefilling):
            if sequence in sequences:
                sequences.remove(sequence)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Whether the whole pool is large enough for its known tokens."""
        return self._blocks_of(sequence) <= self._pool.num_blocks

    def admit(self, *, decoding: list[Sequence]) -> None:
        """Give blocks to waiting sequences, in order, as far as there is room for them.

        `decoding` are the sequences, by rank, with which they share the batch. Where sequences go on to decode, one
        free block for each is left to grow into, so that a newcomer is not the next to be preempted.
        """
        passed: list[Sequence] = []  # in vain
        while len(self.waiting) > len(passed):
            sequence = self.waiting[len(passed)]
            ahead = sum(bisect_left(others, sequence.rank, key=by_rank) for others in (self.prefilling, decoding))
            if ahead >= self._max_num_sequences:
                return
            growing = len(self.prefilling) + len(decoding) if self._decodes_here else 0
            if not self._may_pass(sequence, passed) or not self._take_blocks(sequence, keep_free=growing):
                if self._decodes_here or len(passed) == MAX_PASSED:
                    return
                passed.append(sequence)
                continue
            for other in passed:
                other.passed_by_blocks += max(1, len(sequence.table) - sequence.table.num_shared)
            self.waiting.remove(sequence)
            insort(self.prefilling, sequence, key=by_rank)

    def _may_pass(self, sequence: Sequence, others: list[Sequence]) -> bool:
        num_blocks = self._blocks_of(sequence)
        return all(other.passed_by_blocks + num_blocks <= self._blocks_of(other) for other in others)

    def _take_blocks(self, sequence: Sequence, *, keep_free: int) -> bool:
        """Whether it has its blocks now. In vain is tried once, until something changed in the pool."""
        if sequence.shortage is not None and not sequence.shortage.may_be_over(self._pool, keep_free=keep_free):
            return False
        changes = self._pool.changes
        try:
            self._prefix_cache.take_blocks(sequence, keep_free=keep_free)
        except KvExhausted:
            sequence.shortage = Shortage(changes=changes, keep_free=keep_free)
            return False
        return True

    def schedule(self, *, max_chunks: int) -> list[ScheduledChunk]:
        """The next chunks, at most `max_chunks` of them and at most `chunk_size` tokens together."""
        chunks: list[ScheduledChunk] = []
        tokens_left = self._chunk_size
        scored_left = self._chunk_size if self._fixed_passes else SCORED_PER_STEP
        for sequence in self._in_turn():
            if len(chunks) == max_chunks:
                break
            self._prefix_cache.look_again(sequence)
            start, length = sequence.num_computed_tokens, self._next_length(sequence)
            scores = sequence.wants_scores
            if length > tokens_left or (scores and length > scored_left):
                continue  # a later, shorter one may fit; this one is considered first again in the next step
            tokens_left -= length
            scored_left -= length if scores else 0
            samples = start + length == sequence.num_tokens
            chunks.append(ScheduledChunk(sequence=sequence, start=start, length=length, samples=samples, scores=scores))
        self._went_first = chunks[0].sequence if chunks else None
        return chunks

    def _in_turn(self) -> list[Sequence]:
        """Those with blocks, in the order in which this step takes them."""
        if not self.prefilling or (first := self.prefilling[0]) is not self._went_first:
            return self.prefilling
        if first.num_uncomputed_tokens <= self._chunk_size:
            return self.prefilling

        def waits(sequence: Sequence) -> bool:
            is_short = sequence.num_uncomputed_tokens <= self._chunk_size
            return not is_short or sequence.spec.priority < first.spec.priority

        return sorted(self.prefilling, key=waits)  # in the order of their ranks otherwise

    def _next_length(self, sequence: Sequence) -> int:
        """Tokens of the next chunk."""
        start, uncomputed = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        until_border = self._chunk_size - start % self._chunk_size
        if not self._fixed_passes:
            if sequence.wants_scores:
                until_border = min(until_border, SCORED_PER_STEP - start % SCORED_PER_STEP)
            return min(uncomputed, until_border)
        num_prompt = len(sequence.spec.prompt_token_ids)
        if start >= num_prompt:
            return min(uncomputed, self._chunk_size, REPLAYED_PER_STEP)
        return min(num_prompt - start, until_border)

    def _blocks_of(self, sequence: Sequence) -> int:
        return blocks_for(sequence.num_tokens, block_size=self._block_size) + sequence.num_spare_blocks
