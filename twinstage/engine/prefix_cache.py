"""What the engine does with beginnings that are known: takes them where a sequence starts, publishes what it computed.

    computed ──a token was sampled after it──> published ──logits after it were no numbers──> withdrawn

A model can fail in silence: keys and values that are no numbers show in the logits of a later token only. So blocks are
published once a token was sampled that attends to them, and when a sequence gets logits that are no numbers, none of
its blocks is found any more, be it its own or shared: one of them may be why, and a retry computes them all.

Torch-free. Without a hasher nothing is found and nothing published: every token is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from twinstage.engine.sequence import Sequence
from twinstage.kv.layout import blocks_for
from twinstage.kv.prefix_index import BlockHash, PrefixHasher


class PrefixCache:
    """Between the sequences of one engine and the prefix index of its block pool.

    `hit_multiple` in tokens: what is found ends at a multiple of it, so that the rest is computed from places that do
    not depend on the cache any finer than that. With `whole_chunks` only what a prompt fills up to a multiple of it is
    published: the tokens after that are computed in other passes than those of a longer prompt.
    """

    def __init__(
        self, hasher: PrefixHasher | None, *, block_size: int, hit_multiple: int = 1, whole_chunks: bool = False
    ) -> None:
        self._whole_chunks = whole_chunks
        self._hasher = hasher
        self._block_size = block_size
        self._multiple = math.lcm(hit_multiple, block_size) // block_size  # blocks

    def take_blocks(self, sequence: Sequence, *, keep_free: int) -> None:
        """Give a waiting sequence blocks for all its known tokens; those that are found are computed with it.

        Raises KvExhausted, with nothing changed, unless `keep_free` blocks more remain free.
        """
        sequence.looked_up_at = sequence.table.pool_changes
        count = blocks_for(sequence.num_tokens, block_size=self._block_size) + sequence.num_spare_blocks
        hits = sequence.table.grow(count, keep_free=keep_free, prefix=self._wanted(sequence), multiple=self._multiple)
        self._skip(sequence, hits)

    def look_again(self, sequence: Sequence) -> None:
        """Take what became known since the last time, of a sequence with the same beginning that was ahead."""
        changes = sequence.table.pool_changes
        if changes == sequence.looked_up_at:
            return
        sequence.looked_up_at = changes
        start, offset = divmod(sequence.num_computed_tokens, self._block_size)
        wanted = self._wanted(sequence)[start:]
        if wanted and not offset and not start % self._multiple:
            self._skip(sequence, sequence.table.exchange(start, wanted, multiple=self._multiple))

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks known that were completed since the last time. To be called when a token was sampled."""
        start, end = sequence.num_published_blocks, sequence.num_computed_tokens // self._block_size
        if self._whole_chunks:
            num_prompt_blocks = len(sequence.spec.prompt_token_ids) // self._block_size
            end = min(end, num_prompt_blocks) // self._multiple * self._multiple
        if self._hasher is None or start >= end:
            return
        sequence.table.publish(start, self._names(sequence, self._hasher, end=end)[start:end])
        sequence.num_published_blocks = end

    def withdraw(self, sequence: Sequence) -> None:
        """Let nobody find the blocks of a sequence whose logits are no numbers."""
        sequence.table.withdraw()

    def _skip(self, sequence: Sequence, num_blocks: int) -> None:
        if sequence.num_published_blocks * self._block_size == sequence.num_computed_tokens:
            sequence.num_published_blocks += num_blocks
        sequence.num_computed_tokens += num_blocks * self._block_size

    def _wanted(self, sequence: Sequence) -> Items[BlockHash]:
        """Names of the blocks that need not be computed; a token whose logits are wanted must be, as the last one."""
        if self._hasher is None or sequence.wants_scores:
            return ()
        end = (sequence.num_tokens - 1) // self._block_size
        return self._names(sequence, self._hasher, end=end)[:end]

    def _names(self, sequence: Sequence, hasher: PrefixHasher, *, end: int) -> list[BlockHash]:
        """The names of the first `end` blocks at least."""
        if sequence.hashes is None:
            sequence.hashes = hasher.chain(salt=sequence.spec.cache_salt)
        named = sequence.hashes.num_tokens
        if named < end * self._block_size:
            sequence.hashes.extend(sequence.token_ids_between(named, end * self._block_size))
        return sequence.hashes.hashes
