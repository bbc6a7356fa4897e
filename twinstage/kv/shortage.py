"""A taking of blocks that failed, and when it is worth another try."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.kv.block_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What a pool was asked in vain: `changes` of the pool before, and the blocks that were to stay free."""

    changes: int
    keep_free: int

    def may_be_over(self, pool: BlockPool, *, keep_free: int) -> bool:
        """Whether the same taking, with that many blocks to stay free, can succeed now."""
        return pool.changes != self.changes or keep_free < self.keep_free
