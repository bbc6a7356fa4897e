"""Which sequences an engine has, and the blocks of those that ended while others may still read them."""

from __future__ import annotations

from twinstage.engine.sequence import Sequence
from twinstage.errors import AlreadyExists
from twinstage.kv.block_pool import BlockTable
from twinstage.types import RequestId


class Roster:
    """Live sequences by request id, those among them that are held after their first token, and kept blocks."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Sequence] = {}
        self._held: set[RequestId] = set()
        self._kept: dict[RequestId, BlockTable] = {}

    def check_new(self, request_id: RequestId) -> None:
        """Raise AlreadyExists when the id is live, or blocks are kept under it."""
        if request_id in self._live or request_id in self._kept:
            raise AlreadyExists(
                f"request {request_id} is live in this engine",
                resource_type="request",
                resource_name=request_id,
            )

    def enter(self, sequence: Sequence) -> None:
        """A new sequence; `check_new` comes before anything is taken for it."""
        self._live[sequence.request_id] = sequence

    def get(self, request_id: RequestId) -> Sequence | None:
        """The live sequence of that id."""
        return self._live.get(request_id)

    def all_live(self) -> list[Sequence]:
        """In the order in which they came."""
        return list(self._live.values())

    def all_ids(self) -> list[RequestId]:
        """Of live sequences and of kept blocks."""
        return [*self._live, *self._kept]

    def hold(self, sequence: Sequence) -> None:
        """It computes no more, and lives until it is released."""
        self._held.add(sequence.request_id)

    def held(self, request_id: RequestId) -> Sequence | None:
        """The sequence of that id, if it is held."""
        return self._live[request_id] if request_id in self._held else None

    def leave(self, sequence: Sequence, *, keep_blocks: bool) -> None:
        """The sequence lives no more; its blocks are freed, or kept until `free_kept`."""
        del self._live[sequence.request_id]
        self._held.discard(sequence.request_id)
        if keep_blocks:
            self._kept[sequence.request_id] = sequence.table
        else:
            sequence.table.release()

    def free_kept(self, request_id: RequestId) -> None:
        """Free the blocks that were kept under this id, if any were."""
        if (table := self._kept.pop(request_id, None)) is not None:
            table.release()
