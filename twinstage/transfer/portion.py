"""What a sender has to bring: bytes of a source block, and where they belong."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.transfer.messages import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """`source` goes to [offset, offset + its length) of the receiver's block; see `Piece` for the names."""

    position: int
    block_id: int
    offset: int
    generation: int
    source: memoryview

    def piece(self, *, checksum: int) -> Piece:
        """What the receiver is told of it."""
        return Piece(
            position=self.position,
            block_id=self.block_id,
            offset=self.offset,
            length=len(self.source),
            generation=self.generation,
            checksum=checksum,
        )
