"""Who holds which KV block.

    free ──allocate / grow──> owned ──publish──> sealed ──last release──> cached ──evicted, or reset──> free
      ^                         │                  ^                        │
      └───────── release ───────┘                  └── allocate with prefix ┘

    sealed ──withdraw, or reset──> sealed and unknown ──last release──> free

    owned ──divide──> sealed and not yet known ──publish──> sealed

    free     nobody holds it, its content means nothing
    owned    exactly one BlockTable holds it, and may write it
    sealed   complete and read-only: the prefix index knows what is in it, unless that was withdrawn; any number of
             tables hold it. One that was divided before it was published is not known yet
    cached   nobody holds it, but the index still knows it; counts as free, the least recently used is evicted first

A `BlockTable` is the holding. Every table has a generation of its own; the blocks that it owns answer it, all others
answer none. So a handle that names (block, generation) is void as soon as its owner gave the block back or anybody else
may read it.

The pool is shared by the threads of a worker: intake reserves on the event loop while the engine grows and frees.
One lock guards the books; callbacks run outside it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from twinstage.errors import ConfigError, IntegrityError, KvExhausted, StaleHandle
from twinstage.kv.block_table import BlockTable
from twinstage.kv.pool_check import check_books
from twinstage.kv.prefix_index import BlockHash, PrefixIndex, PrefixLookups
from twinstage.kv.victims import choose_victims

__all__ = ["FREE_GENERATION", "BlockPool", "BlockTable", "PrefixLookups"]

FREE_GENERATION = 0  # what `generation_of` answers for a block that no table owns; tables start at 1


class BlockPool:
    """The blocks `0 .. num_blocks - 1`, who holds them, and what is known of their content. Thread-safe."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a KV pool needs at least one block, not {num_blocks}; raise --kv-cache-bytes")
        self.num_blocks = num_blocks
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._holders = [0] * num_blocks  # tables that hold the block
        self._generations = [FREE_GENERATION] * num_blocks
        self._last_generation = FREE_GENERATION
        self._index = PrefixIndex()
        self._unnamed: set[int] = set()  # sealed blocks that are not known yet
        self._resets = 0
        self._changes = 0
        self.prefix_lookups = PrefixLookups()  # since the start
        self._tables: set[BlockTable] = set()
        self._free_listeners: tuple[Callable[[], None], ...] = ()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        with self._lock:
            return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is known."""
        return len(self._cached)

    @property
    def changes(self) -> int:
        """Counts what lets a taking succeed that failed, or find more: blocks came back, or content became known."""
        return self._changes

    def allocate(self, count: int, *, owner: str, keep_free: int = 0, prefix: Sequence[BlockHash] = ()) -> BlockTable:
        """A table of `count` blocks (possibly 0), all or nothing, under a new generation.

        `owner` names the holder in error messages. Of the blocks that `prefix` names, the longest known beginning is
        shared (`num_shared`); the others are owned. Raises KvExhausted unless the blocks are free and `keep_free` more
        remain.
        """
        with self._lock:
            table = BlockTable(self, owner=owner, generation=self._last_generation + 1, resets=self._resets)
            self._append(table, count, keep_free, prefix, 1)
            self._last_generation += 1
            self._tables.add(table)
        return table

    def generation_of(self, block_id: int) -> int:
        """Generation of the table that owns the block, `FREE_GENERATION` when nobody does: it may not be written.

        Raises StaleHandle when there is no such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise StaleHandle(f"block {block_id} is not one of the {self.num_blocks} blocks of this pool")
        with self._lock:
            return self._generations[block_id]

    def reset_prefix_cache(self) -> int:
        """Forget what is in the blocks; returns of how many. Cached ones are free, held ones are not shared anew."""
        with self._lock:
            dropped = self._index.clear()
            self._unnamed.clear()
            self._free.extend(self._cached)
            self._cached.clear()
            self._resets += 1
            return dropped

    def add_free_listener(self, callback: Callable[[], None]) -> None:
        """After blocks were freed, call `callback` outside the lock, on that thread; it is quick and never raises."""
        with self._lock:
            self._free_listeners = (*self._free_listeners, callback)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is in exactly one of the states above, and all books agree."""
        with self._lock:
            self._index.check_integrity()
            check_books(
                free=self._free,
                cached=self._cached,
                tables=[(table.owner, table.generation, table._block_ids) for table in self._tables],
                holders=self._holders,
                generations=self._generations,
                index=self._index,
                unnamed=self._unnamed,
            )

    def owners(self) -> dict[str, int]:
        """Blocks by who holds them, shared ones for each holder: what to print when blocks are missing at the end."""
        held: Counter[str] = Counter()
        with self._lock:
            for table in self._tables:
                held[table.owner] += len(table._block_ids)
        return dict(held)

    # --- for BlockTable --------------------------------------------------------------------------

    def _grow(self, table: BlockTable, count: int, keep_free: int, prefix: Sequence[BlockHash], multiple: int) -> int:
        with self._lock:
            return self._append(table, count, keep_free, prefix, multiple)

    def _exchange(self, table: BlockTable, start: int, prefix: Sequence[BlockHash], multiple: int) -> int:
        with self._freeing():
            known = self._index.match(prefix[: max(0, len(table) - start)], multiple=multiple)
            replaced = table._block_ids[start : start + len(known)]
            if any(self._generations[block_id] != table.generation for block_id in replaced):
                raise IntegrityError(f"{table.owner!r} does not own the blocks that it wants to exchange")
            for block_id in known:
                self._hold(block_id)
            table._block_ids = (*table._block_ids[:start], *known, *table._block_ids[start + len(known) :])
            for block_id in replaced:
                self._let_go(block_id)
            self.prefix_lookups = self.prefix_lookups.plus(
                wanted=0, found=len(known)
            )  # they were counted as wanted before
        return len(known)

    def _publish(self, table: BlockTable, start: int, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            if table._resets != self._resets:
                return
            for block_id, name in zip(table._block_ids[start:], hashes, strict=False):
                is_new = self._generations[block_id] == table.generation or block_id in self._unnamed
                if is_new and self._index.add(name, block_id):
                    self._generations[block_id] = FREE_GENERATION
                    self._unnamed.discard(block_id)
                    self._changes += 1

    def _withdraw(self, table: BlockTable) -> None:
        with self._lock:
            for block_id in table._block_ids:
                self._index.discard(block_id)
                self._unnamed.discard(block_id)

    def _divide(self, table: BlockTable, owners: Sequence[str], num_shared: int, num_own: int) -> list[BlockTable]:
        with self._freeing():
            if num_shared + num_own * len(owners) > len(table):
                raise IntegrityError(f"{table.owner!r} has too few blocks for {len(owners)} owners")
            parts = [self._part(table, owner, num_shared, num_own, index) for index, owner in enumerate(owners)]
            self._give_back(table)
        return parts

    def _release(self, table: BlockTable) -> None:
        with self._freeing():
            self._give_back(table)

    def _take_over(self, table: BlockTable, candidates: Sequence[BlockTable], count: int) -> list[BlockTable]:
        with self._freeing():
            held = [candidate._block_ids for candidate in candidates]
            chosen = choose_victims(held, self._holders, wanted=count - self._num_free)
            if chosen is None:
                raise KvExhausted(f"{count} KV blocks wanted, {len(candidates)} tables do not free as many")
            victims = [candidates[position] for position in chosen]
            for victim in victims:
                self._give_back(victim)
            self._append(table, count, 0, (), 1)
        return victims

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        """With the lock; afterwards the listeners hear of it if more blocks are free."""
        with self._lock:
            free_before = self._num_free
            yield
            is_more_free = self._num_free > free_before
        if is_more_free:
            for listener in self._free_listeners:
                listener()

    # --- with the lock held ----------------------------------------------------------------------

    @property
    def _num_free(self) -> int:
        return len(self._free) + len(self._cached)

    def _append(self, table: BlockTable, count: int, keep_free: int, prefix: Sequence[BlockHash], multiple: int) -> int:
        """How many of the new blocks are shared."""
        if table._released:
            raise IntegrityError(f"the table of {table.owner!r} was released and cannot grow")
        if count < 0 or keep_free < 0:
            raise IntegrityError(f"cannot take {count} blocks and keep {keep_free}")
        shared = self._index.match(prefix[:count], multiple=multiple)
        # Blocks that others hold already cost nothing.
        wanted = count - sum(self._holders[block_id] > 0 for block_id in shared)
        if wanted + keep_free > self._num_free:
            reserve = f" with {keep_free} kept free" if keep_free else ""
            raise KvExhausted(f"{wanted} KV blocks wanted{reserve}, {self._num_free} of {self.num_blocks} are free")
        for block_id in shared:  # before anything is evicted
            self._hold(block_id)
        owned = [self._take(table.generation) for _ in range(count - len(shared))]
        self.prefix_lookups = self.prefix_lookups.plus(wanted=len(prefix[:count]), found=len(shared))
        if not table._block_ids:
            table.num_shared = len(shared)
        table._block_ids = (*table._block_ids, *shared, *owned)
        return len(shared)

    def _part(self, table: BlockTable, owner: str, num_shared: int, num_own: int, index: int) -> BlockTable:
        """A table that holds a part of another one beside it: the blocks that all share, and some that only it gets."""
        start = num_shared + num_own * index
        self._last_generation += 1
        part = BlockTable(self, owner=owner, generation=self._last_generation, resets=table._resets)
        part.num_shared = table.num_shared
        part._block_ids = (*table._block_ids[:num_shared], *table._block_ids[start : start + num_own])
        for block_id in part._block_ids:
            self._holders[block_id] += 1
        for block_id in part._block_ids[:num_shared]:
            if self._generations[block_id] == table.generation:
                self._generations[block_id] = FREE_GENERATION
                self._unnamed.add(block_id)
        for block_id in part._block_ids[num_shared:]:
            self._generations[block_id] = part.generation
        self._tables.add(part)
        return part

    def _take(self, generation: int) -> int:
        """A free block, now owned; there must be one."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._index.discard(block_id)
        self._holders[block_id] = 1
        self._generations[block_id] = generation
        return block_id

    def _hold(self, block_id: int) -> None:
        """One table more holds a sealed block."""
        self._holders[block_id] += 1
        self._cached.pop(block_id, None)

    def _let_go(self, block_id: int) -> None:
        """One table less holds a block."""
        self._holders[block_id] -= 1
        if self._holders[block_id]:
            return
        self._generations[block_id] = FREE_GENERATION
        self._unnamed.discard(block_id)
        self._changes += 1
        if block_id in self._index:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _give_back(self, table: BlockTable) -> None:
        if table._released:
            return
        block_ids = table._block_ids
        table._released = True
        table._block_ids = ()
        self._tables.remove(table)
        # From the end: of a beginning, its last block is the first to be evicted, and what remains can still be found.
        for block_id in reversed(block_ids):
            self._let_go(block_id)
