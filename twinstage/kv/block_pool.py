"""Who owns which KV block.

    free ──allocate / grow──> owned by exactly one BlockTable ──release──> free

A `BlockTable` is the ownership: an ordered list of blocks that go back to the pool when it is released, once, on
whatever path. Every allocation draws a new generation; the blocks of a table answer it until they are released, so a
handle that names (block, generation) is void as soon as its owner gave the block back.

The pool is shared by the threads of a worker: intake reserves on the event loop while the engine grows and frees.
One lock guards the books; callbacks run outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from twinstage.errors import ConfigError, IntegrityError, KvExhausted, StaleHandle

FREE_GENERATION = 0  # what `generation_of` answers for a free block; allocations start at 1


class BlockTable:
    """Some blocks, owned, in the order of their sequence; made by `BlockPool.allocate`.

    Leaving the `with` block of a table releases it. A table may be used by any thread, one at a time.
    """

    __slots__ = ("_block_ids", "_pool", "_released", "generation", "owner")

    def __init__(self, pool: BlockPool, *, owner: str, generation: int, block_ids: tuple[int, ...]) -> None:
        self._pool = pool
        self._block_ids = block_ids
        self._released = False
        self.owner = owner
        self.generation = generation

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks in order; empty once released."""
        return self._block_ids

    def grow(self, count: int, *, keep_free: int = 0) -> None:
        """Append `count` blocks of the same generation.

        Raises KvExhausted, with nothing changed, unless they are free and `keep_free` more remain; IntegrityError
        when the table was released.
        """
        self._pool._grow(self, count, keep_free)

    def take_over(self, victim: BlockTable, count: int) -> None:
        """Release `victim` and append `count` blocks, with no moment in between when another thread could take them.

        Raises KvExhausted when that is not enough; `victim` is released all the same.
        """
        self._pool._take_over(self, victim, count)

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


class BlockPool:
    """The blocks `0 .. num_blocks - 1` and who owns them. Thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a KV pool needs at least one block, not {num_blocks}; raise --kv-cache-bytes")
        self.num_blocks = num_blocks
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm in the caches
        self._generations = [FREE_GENERATION] * num_blocks
        self._last_generation = FREE_GENERATION
        self._tables: set[BlockTable] = set()
        self._free_listeners: tuple[Callable[[], None], ...] = ()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int, *, owner: str, keep_free: int = 0) -> BlockTable:
        """A table of `count` blocks (possibly 0), all or nothing, under a new generation.

        `owner` names the holder in error messages. Raises KvExhausted unless the blocks are free and `keep_free`
        more remain.
        """
        with self._lock:
            block_ids = self._take(count, keep_free)
            self._last_generation += 1
            table = BlockTable(self, owner=owner, generation=self._last_generation, block_ids=block_ids)
            self._stamp(block_ids, table.generation)
            self._tables.add(table)
        return table

    def generation_of(self, block_id: int) -> int:
        """Generation of the allocation that owns the block, `FREE_GENERATION` when nobody does.

        Raises StaleHandle when there is no such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise StaleHandle(f"block {block_id} is not one of the {self.num_blocks} blocks of this pool")
        with self._lock:
            return self._generations[block_id]

    def add_free_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time after blocks were freed, outside the lock, on the thread that freed them.

        It must be quick and must not raise.
        """
        with self._lock:
            self._free_listeners = (*self._free_listeners, callback)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or owned by exactly one live table, under its generation."""
        with self._lock:
            holders: dict[int, str] = {}
            expected: dict[int, int] = {}
            for block_id in self._free:
                _claim(holders, block_id, "the free list")
                expected[block_id] = FREE_GENERATION
            for table in self._tables:
                for block_id in table._block_ids:
                    _claim(holders, block_id, repr(table.owner))
                    expected[block_id] = table.generation
            if len(holders) != self.num_blocks:
                raise IntegrityError(f"nobody holds blocks {sorted(set(range(self.num_blocks)) - holders.keys())}")
            for block_id, generation in expected.items():
                self._check_generation(block_id, generation)

    def owners(self) -> dict[str, int]:
        """Blocks held by owner: what to print when blocks are missing at the end."""
        with self._lock:
            held: dict[str, int] = {}
            for table in self._tables:
                held[table.owner] = held.get(table.owner, 0) + len(table._block_ids)
            return held

    # --- for BlockTable --------------------------------------------------------------------------

    def _grow(self, table: BlockTable, count: int, keep_free: int) -> None:
        with self._lock:
            self._append(table, count, keep_free)

    def _release(self, table: BlockTable) -> None:
        with self._lock:
            freed = self._give_back(table)
        if freed:
            self._tell_listeners()

    def _take_over(self, table: BlockTable, victim: BlockTable, count: int) -> None:
        shortage: KvExhausted | None = None
        with self._lock:
            free_before = len(self._free)
            self._give_back(victim)
            try:
                self._append(table, count, 0)
            except KvExhausted as error:
                shortage = error
            is_more_free = len(self._free) > free_before
        if is_more_free:
            self._tell_listeners()
        if shortage is not None:
            raise shortage

    def _tell_listeners(self) -> None:
        for listener in self._free_listeners:
            listener()

    # --- with the lock held ----------------------------------------------------------------------

    def _append(self, table: BlockTable, count: int, keep_free: int) -> None:
        if table._released:
            raise IntegrityError(f"the table of {table.owner!r} was released and cannot grow")
        block_ids = self._take(count, keep_free)
        self._stamp(block_ids, table.generation)
        table._block_ids = (*table._block_ids, *block_ids)

    def _give_back(self, table: BlockTable) -> bool:
        """Whether blocks became free."""
        if table._released:
            return False
        block_ids = table._block_ids
        table._released = True
        table._block_ids = ()
        self._tables.remove(table)
        self._stamp(block_ids, FREE_GENERATION)
        self._free.extend(reversed(block_ids))
        return bool(block_ids)

    def _take(self, count: int, keep_free: int) -> tuple[int, ...]:
        if count < 0 or keep_free < 0:
            raise IntegrityError(f"cannot take {count} blocks and keep {keep_free}")
        if count + keep_free > len(self._free):
            reserve = f" with {keep_free} kept free" if keep_free else ""
            raise KvExhausted(f"{count} KV blocks wanted{reserve}, {len(self._free)} of {self.num_blocks} are free")
        return tuple(self._free.pop() for _ in range(count))

    def _stamp(self, block_ids: tuple[int, ...], generation: int) -> None:
        for block_id in block_ids:
            self._generations[block_id] = generation

    def _check_generation(self, block_id: int, expected: int) -> None:
        if self._generations[block_id] != expected:
            raise IntegrityError(f"block {block_id} has generation {self._generations[block_id]}, not {expected}")


def _claim(holders: dict[int, str], block_id: int, holder: str) -> None:
    if block_id in holders:
        raise IntegrityError(f"block {block_id} is held by {holders[block_id]} and by {holder}")
    holders[block_id] = holder
