"""What holds KV blocks: one list of them, given back once."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from twinstage.kv.prefix_index import BlockHash

if TYPE_CHECKING:
    from twinstage.kv.block_pool import BlockPool


class BlockTable:
    """Some blocks in the order of their sequence; made by `BlockPool.allocate`.

    Leaving the `with` block of a table releases it. A table may be used by any thread, one at a time.
    """

    __slots__ = ("_block_ids", "_pool", "_released", "_resets", "generation", "num_shared", "owner")

    def __init__(self, pool: BlockPool, *, owner: str, generation: int, resets: int) -> None:
        self._pool = pool
        self._block_ids: tuple[int, ...] = ()
        self._released = False
        self._resets = resets  # of the prefix index, before this table was made
        self.owner = owner
        self.generation = generation
        self.num_shared = 0  # leading blocks that came from the prefix index when the table got its first blocks

    @property
    def pool_changes(self) -> int:
        """`BlockPool.changes` of its pool."""
        return self._pool.changes

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks in order; empty once released."""
        return self._block_ids

    def grow(self, count: int, *, keep_free: int = 0, prefix: Sequence[BlockHash] = (), multiple: int = 1) -> int:
        """Append `count` blocks; returns how many of them, the first ones, are shared because their content is known.

        `prefix` names what the first of them shall hold; a multiple of `multiple` of them is shared. The others are
        owned. Raises KvExhausted, with nothing changed, unless the blocks are free and `keep_free` more remain;
        IntegrityError when the table was released.
        """
        return self._pool._grow(self, count, keep_free, prefix, multiple)

    def exchange(self, start: int, prefix: Sequence[BlockHash], *, multiple: int = 1) -> int:
        """Replace owned blocks from position `start` on, nothing of which was written, by shared ones of that content.

        Returns how many, a multiple of `multiple`. Raises IntegrityError when a block is not owned.
        """
        return self._pool._exchange(self, start, prefix, multiple)

    def publish(self, start: int, hashes: Sequence[BlockHash]) -> None:
        """The blocks from position `start` on are complete and have these names: seal them and enter them in the index.

        One whose name is known already stays as it is. Nothing happens when the index was reset since the table was
        made: what is computed from forgotten blocks is not to be found either.
        """
        self._pool._publish(self, start, hashes)

    def withdraw(self) -> None:
        """Forget what is in these blocks, shared ones too: it is not found any more. Who holds them keeps them."""
        self._pool._withdraw(self)

    def take_over(self, candidates: Sequence[BlockTable], count: int) -> list[BlockTable]:
        """Append `count` blocks, for which as few of `candidates` as that takes are released; returns those.

        The first ones are taken first, but none that frees nothing. There is no moment in between when another thread
        could take the blocks. Raises KvExhausted, with nothing changed, when all candidates together are not enough.
        """
        return self._pool._take_over(self, candidates, count)

    def divide(self, owners: Sequence[str], num_shared: int, *, num_own: int) -> list[BlockTable]:
        """A table for each of `owners`, to which nothing is left to this one: it counts as released.

        All of them share the first `num_shared` blocks, which are complete and sealed now. Of those after them, each
        gets the next `num_own`; what is left over is free. Raises IntegrityError when there are too few.
        """
        return self._pool._divide(self, owners, num_shared, num_own)

    def release(self) -> None:
        """Give all blocks back. Idempotent."""
        self._pool._release(self)

    def __len__(self) -> int:
        return len(self._block_ids)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"BlockTable(owner={self.owner!r}, generation={self.generation}, block_ids={self._block_ids})"
