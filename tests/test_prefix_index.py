"""Prefix caching in the block pool: names of blocks, sharing, eviction, and the books, also against a simple model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as count_up
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from twinstage.errors import IntegrityError, KvExhausted
from twinstage.kv.block_pool import FREE_GENERATION, BlockPool
from twinstage.kv.block_table import BlockTable
from twinstage.kv.prefix_index import BlockHash, PrefixHasher
from twinstage.kv.shortage import Shortage

SIZE = 4  # tokens in a block
HASHER = PrefixHasher("layout", block_size=SIZE)


def names(tokens: Sequence[int], *, salt: str = "") -> list[BlockHash]:
    return HASHER.chain(tokens, salt=salt).hashes


# --- names ----------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_a_name_depends_on_all_tokens_before_it_and_not_on_how_they_came(tokens: list[int], cuts: list[int]) -> None:
    whole = names(tokens)
    assert len(whole) == len(tokens) // SIZE
    grown = HASHER.chain()
    for end in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        grown.extend(tokens[grown.num_tokens : end])
    assert grown.hashes == whole
    for position in range(len(whole) * SIZE):
        changed = names([*tokens[:position], tokens[position] ^ 1, *tokens[position + 1 :]])
        first = position // SIZE
        assert changed[:first] == whole[:first]
        assert not set(changed[first:]) & set(whole)


def test_other_layouts_and_other_salts_have_other_names() -> None:
    tokens = range(8)
    others = [
        names(tokens, salt="tenant"),
        PrefixHasher("other layout", block_size=SIZE).chain(tokens).hashes,
        PrefixHasher("layout", block_size=8).chain(tokens).hashes,
    ]
    for other in others:
        assert not set(names(tokens)) & set(other)
    assert names(tokens) == PrefixHasher("layout", block_size=SIZE).chain(tokens).hashes


# --- sharing --------------------------------------------------------------------------------------


def test_a_published_beginning_is_shared_and_only_the_rest_is_owned() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3, owner="first")
    first.publish(0, names(range(8)))
    second = pool.allocate(4, owner="second", prefix=names(range(12)))
    assert second.num_shared == 2
    assert second.block_ids[:2] == first.block_ids[:2]
    assert set(second.block_ids[2:]).isdisjoint(first.block_ids)
    assert pool.num_free == 8 - 3 - 2
    assert [pool.generation_of(block_id) for block_id in second.block_ids] == [
        FREE_GENERATION,
        FREE_GENERATION,
        second.generation,
        second.generation,
    ]
    pool.check_integrity()
    first.release()
    assert pool.num_free == 8 - 4
    assert pool.num_cached == 0
    second.release()
    assert (pool.num_free, pool.num_cached) == (8, 2)
    pool.check_integrity()


def test_a_grant_of_a_block_is_void_once_the_block_may_be_read_by_others() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1, owner="a")
    assert pool.generation_of(table.block_ids[0]) == table.generation
    table.publish(0, names(range(4)))
    assert pool.generation_of(table.block_ids[0]) == FREE_GENERATION
    table.release()
    assert pool.allocate(1, owner="b", prefix=names(range(4))).num_shared == 1
    assert pool.generation_of(0) == FREE_GENERATION


def test_cached_blocks_are_evicted_least_recently_used_first_and_from_the_end_of_a_beginning() -> None:
    pool = BlockPool(6)
    for start in (0, 100, 200):
        table = pool.allocate(2, owner="filler")
        table.publish(0, names(range(start, start + 8)))
        table.release()
    assert (pool.num_free, pool.num_cached) == (6, 6)
    pool.allocate(2, owner="again", prefix=names(range(8))).release()  # the oldest becomes the newest
    pool.allocate(3, owner="needs three").release()

    def known(start: int) -> int:
        with pool.allocate(2, owner="probe", prefix=names(range(start, start + 8))) as probe:
            return probe.num_shared

    assert known(0) == 2
    assert known(200) == 1  # its second block went, its first can still be found
    pool.check_integrity()


def test_blocks_that_are_shared_already_cost_nothing_and_cached_ones_count_as_free() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3, owner="first")
    first.publish(0, names(range(12)))
    with pytest.raises(KvExhausted, match="2 KV blocks wanted, 1 of 4 are free"):
        pool.allocate(5, owner="too many", prefix=names(range(12)))
    with pytest.raises(KvExhausted):
        pool.allocate(4, owner="no room to grow", keep_free=1, prefix=names(range(12)))
    second = pool.allocate(4, owner="second", prefix=names(range(12)))
    second.release()
    first.release()
    with pytest.raises(KvExhausted):  # what would be shared is not evicted to make room for the rest
        pool.allocate(5, owner="too many", prefix=names(range(12)))
    assert pool.num_cached == 3
    assert pool.allocate(4, owner="all", prefix=names(range(12))).num_shared == 3
    pool.check_integrity()


def test_equal_blocks_that_were_computed_twice_are_known_once() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2, owner="first"), pool.allocate(2, owner="second")
    first.publish(0, names(range(8)))
    second.publish(0, names(range(8)))
    assert {pool.generation_of(block_id) for block_id in second.block_ids} == {second.generation}
    second.release()
    first.release()
    assert (pool.num_free, pool.num_cached) == (4, 2)
    pool.check_integrity()


def test_unwritten_blocks_are_exchanged_for_what_became_known_meanwhile() -> None:
    pool = BlockPool(6)
    told: list[int] = []
    first, second = pool.allocate(3, owner="first"), pool.allocate(3, owner="second")
    pool.add_free_listener(lambda: told.append(pool.num_free))
    assert second.exchange(0, names(range(8))) == 0
    first.publish(0, names(range(8)))
    last = second.block_ids[2]
    assert second.exchange(0, names(range(8)), multiple=2) == 2
    assert second.block_ids == (*first.block_ids[:2], last)
    assert told == [2]
    with pytest.raises(IntegrityError, match="does not own"):
        second.exchange(0, names(range(8)))
    pool.check_integrity()


def test_hits_end_at_multiples() -> None:
    pool = BlockPool(12)
    table = pool.allocate(3, owner="a")
    table.publish(0, names(range(12)))
    other = pool.allocate(0, owner="b")
    assert other.grow(4, prefix=names(range(12)), multiple=2) == 2
    assert len(other) == 4
    pool.check_integrity()


def test_a_reset_forgets_everything_and_what_was_begun_before_it() -> None:
    pool = BlockPool(10)
    old, running = pool.allocate(2, owner="old"), pool.allocate(3, owner="running")
    old.publish(0, names(range(8)))
    running.publish(0, names(range(100, 108)))
    old.release()
    assert pool.reset_prefix_cache() == 4
    assert (pool.num_free, pool.num_cached) == (7, 0)
    pool.check_integrity()
    assert pool.generation_of(running.block_ids[0]) == FREE_GENERATION  # others may be reading it still
    running.publish(2, names(range(100, 112))[2:])
    new = pool.allocate(2, owner="new", prefix=names(range(100, 108)))
    assert new.num_shared == 0
    new.publish(0, names(range(100, 108)))
    assert pool.allocate(3, owner="after", prefix=names(range(100, 112))).num_shared == 2
    running.release()
    assert (pool.num_free, pool.num_cached) == (7, 0)
    pool.check_integrity()


def test_taking_over_releases_nobody_whose_blocks_others_hold() -> None:
    pool = BlockPool(6)
    first = pool.allocate(2, owner="first")
    first.publish(0, names(range(8)))
    sharer = pool.allocate(2, owner="sharer", prefix=names(range(8)))
    other, table = pool.allocate(3, owner="other"), pool.allocate(1, owner="table")
    with pytest.raises(KvExhausted):
        table.take_over([sharer], 1)
    assert table.take_over([sharer, other], 1) == [other]
    assert (len(sharer), len(table), pool.num_free) == (2, 2, 2)
    assert table.take_over([sharer, first], 4) == [sharer, first], "together they free what they share"
    assert (len(table), pool.num_cached) == (6, 0)
    pool.check_integrity()


def test_what_is_withdrawn_is_found_no_more_and_stays_with_its_holders() -> None:
    pool = BlockPool(8)
    first = pool.allocate(2, owner="first")
    first.publish(0, names(range(8)))
    second = pool.allocate(3, owner="second", prefix=names(range(8)))
    second.publish(2, names(range(12))[2:])
    first.withdraw()
    assert pool.allocate(0, owner="late").grow(1, prefix=names(range(4))) == 0
    assert second.block_ids[:2] == first.block_ids
    assert [pool.generation_of(block_id) for block_id in second.block_ids] == [FREE_GENERATION] * 3
    pool.check_integrity()
    first.release()
    second.release()
    assert (pool.num_free, pool.num_cached) == (8 - 1, 1)
    again = pool.allocate(2, owner="again", prefix=names(range(8)))
    assert again.num_shared == 0
    again.publish(0, names(range(8)))
    assert pool.allocate(3, owner="all", prefix=names(range(12))).num_shared == 3
    pool.check_integrity()


def test_broken_books_of_the_cache_are_noticed() -> None:
    pool = BlockPool(2)
    table = pool.allocate(2, owner="a")
    table.publish(0, names(range(4)))
    sealed, owned = table.block_ids
    pool._generations[sealed] = table.generation
    with pytest.raises(IntegrityError, match="may be written"):
        pool.check_integrity()
    pool._generations[sealed] = FREE_GENERATION
    pool._holders[owned] += 1
    with pytest.raises(IntegrityError, match="counts 2 tables, 1 hold it"):
        pool.check_integrity()
    pool._holders[owned] -= 1
    table.release()
    pool._index.discard(sealed)
    with pytest.raises(IntegrityError, match="does not know it"):
        pool.check_integrity()


# --- against a simple model -----------------------------------------------------------------------

NUM_BLOCKS = 10


class Held:
    """A table, and what the model believes of it: by position a name, or None for a block that it owns."""

    def __init__(self, table: BlockTable, tokens: list[int], names_held: list[BlockHash | None]) -> None:
        self.table = table
        self.tokens = tokens
        self.names = names_held
        self.num_written = sum(name is not None for name in names_held)
        self.is_before_reset = False


class PrefixMachine(RuleBasedStateMachine):
    """Sequences over two tokens, so that beginnings repeat, in a pool of few blocks.

    The model: how often each name is held, and the names that nobody holds, oldest first. What stands in the blocks is
    kept beside it, as the tokens up to their end: a shared block must hold what the sharer would have computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[Held] = []
        self.known: dict[BlockHash, int] = {}  # holders by name
        self.idle: list[BlockHash] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.serial = count_up()
        self.shortage: tuple[list[int], int, Shortage] | None = None  # what was wanted in vain, and when

    def num_free(self) -> int:
        owned = sum(held.names.count(None) for held in self.tables)
        shared = {name for held in self.tables for name in held.names if name is not None}
        return NUM_BLOCKS - owned - len(shared)

    def take(self, count: int, hits: list[BlockHash]) -> None:
        """`hits` are held once more; for the other blocks, the oldest idle ones go when no empty one is left."""
        for name in hits:
            self.known[name] += 1
            if name in self.idle:
                self.idle.remove(name)
        empty = self.num_free() - len(self.idle)
        # The table in question is not in self.tables yet: its hits are idle no more, but still count as free.
        empty -= sum(self.known[name] == 1 for name in hits)
        for _ in range(max(0, count - len(hits) - empty)):
            del self.known[self.idle.pop(0)]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), keep_free=st.integers(0, 2))
    def allocate(self, tokens: list[int], keep_free: int) -> None:
        count, wished = -(-len(tokens) // SIZE), names(tokens)
        hits = list(takewhile(lambda name: name in self.known, wished))
        wanted = self.wanted(tokens)
        if wanted + keep_free > self.num_free():
            self.shortage = tokens, keep_free, Shortage(changes=self.pool.changes, keep_free=keep_free)
            with pytest.raises(KvExhausted):
                self.pool.allocate(count, owner="x", keep_free=keep_free, prefix=wished)
            return
        table = self.pool.allocate(count, owner="x", keep_free=keep_free, prefix=wished)
        assert table.num_shared == len(hits)
        for position in range(len(hits)):
            expected = tuple(tokens[: (position + 1) * SIZE])
            assert self.content[table.block_ids[position]] == expected, "a hit is not what it is named after"
        self.take(count, hits)
        held: list[BlockHash | None] = [*hits, *[None] * (count - len(hits))]
        self.tables.append(Held(table, tokens, held))

    def wanted(self, tokens: list[int]) -> int:
        """Free blocks that a sequence takes."""
        hits = takewhile(lambda name: name in self.known, names(tokens))
        return -(-len(tokens) // SIZE) - sum(self.known[name] > 0 for name in hits)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 3))
    def write_and_publish(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.sampled_from(self.tables))
        complete = names(held.tokens)
        start, end = held.num_written, min(held.num_written + count, len(complete))
        for position in range(start, end):
            block_id = held.table.block_ids[position]
            assert self.pool.generation_of(block_id) == held.table.generation, "a block that others may read is written"
            self.content[block_id] = tuple(held.tokens[: (position + 1) * SIZE])
        held.table.publish(start, complete[start:end])
        held.num_written = end
        for position in range(start, end):
            if complete[position] not in self.known and not held.is_before_reset:
                self.known[complete[position]] = 1
                held.names[position] = complete[position]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.tables))
        start, wished = held.num_written, names(held.tokens)[held.num_written :]
        hits = list(takewhile(lambda name: name in self.known, wished))
        assert held.table.exchange(start, wished) == len(hits)
        for name in hits:
            self.known[name] += 1
            if name in self.idle:
                self.idle.remove(name)
        held.names[start : start + len(hits)] = hits
        held.num_written += len(hits)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.tables))
        held.table.release()
        self.let_go(held)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.tables))
        held.table.withdraw()
        for name in [name for name in held.names if name in self.known]:
            del self.known[name]
            forgotten = BlockHash(b"withdrawn %d " % next(self.serial) + name)  # still shared by those who hold it
            for other in self.tables:
                other.names = [forgotten if mine == name else mine for mine in other.names]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        held = data.draw(st.sampled_from(self.tables))
        if count > self.num_free():
            with pytest.raises(KvExhausted):
                held.table.grow(count)
            return
        held.table.grow(count)
        self.evict(count)
        held.names += [None] * count

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data(), count=st.integers(1, 6))
    def take_over(self, data: st.DataObject, count: int) -> None:
        order = data.draw(st.permutations(self.tables))
        held, candidates = order[0], order[1 : 1 + data.draw(st.integers(1, len(order) - 1))]
        if self.num_free_without(candidates) < count:
            with pytest.raises(KvExhausted):
                held.table.take_over([other.table for other in candidates], count)
            return
        released = held.table.take_over([other.table for other in candidates], count)
        victims = [other for other in candidates if other.table in released]
        assert self.num_free_without(victims) >= count
        for spared in victims:
            rest = [other for other in victims if other is not spared]
            assert self.num_free_without(rest) < count, "a table was released in vain"
        for victim in victims:  # in the order of release
            self.let_go(victim)
        self.evict(count)
        held.names += [None] * count

    def num_free_without(self, released: list[Held]) -> int:
        tables, self.tables = self.tables, [held for held in self.tables if held not in released]
        try:
            return self.num_free()
        finally:
            self.tables = tables

    def evict(self, count: int) -> None:
        """Before `count` blocks are taken: the oldest idle ones go when there are not as many empty ones."""
        for _ in range(max(0, count - (self.num_free() - len(self.idle)))):
            del self.known[self.idle.pop(0)]

    def let_go(self, held: Held) -> None:
        self.tables.remove(held)
        for name in reversed(held.names):
            if name in self.known:
                self.known[name] -= 1
                if not self.known[name]:
                    self.idle.append(name)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == len(self.known)
        self.known.clear()
        self.idle.clear()
        for held in self.tables:
            held.is_before_reset = True
            # What is held is not found any more, but its holders still share it: a name that nobody looks up.
            held.names = [None if name is None else BlockHash(b"forgotten " + name) for name in held.names]

    @invariant()
    def a_shortage_is_over_only_after_a_change(self) -> None:
        if self.shortage is None:
            return
        tokens, keep_free, shortage = self.shortage
        if not shortage.may_be_over(self.pool, keep_free=keep_free):
            assert self.wanted(tokens) + keep_free > self.num_free()
        assert not keep_free or shortage.may_be_over(self.pool, keep_free=keep_free - 1)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_cached == len(self.idle)
        assert self.pool.num_free == self.num_free()


PrefixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestPrefixMachine = PrefixMachine.TestCase
