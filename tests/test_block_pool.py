"""The block pool: ownership, generations, all-or-nothing, and the same under threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from twinstage.errors import ConfigError, IntegrityError, KvExhausted, StaleHandle
from twinstage.kv.block_pool import FREE_GENERATION, BlockPool, BlockTable
from twinstage.kv.prefix_index import PrefixHasher


def test_blocks_are_owned_until_released() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3, owner="a")
    assert len(table) == 3
    assert len(set(table.block_ids)) == 3
    assert pool.num_free == 1
    assert pool.owners() == {"a": 3}
    pool.check_integrity()
    table.release()
    assert pool.num_free == 4
    assert table.block_ids == ()
    pool.check_integrity()


def test_releasing_twice_frees_once() -> None:
    pool = BlockPool(2)
    first = pool.allocate(2, owner="a")
    first.release()
    second = pool.allocate(2, owner="b")
    first.release()
    assert pool.num_free == 0
    assert len(second) == 2
    pool.check_integrity()


def test_leaving_the_scope_releases() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError), pool.allocate(2, owner="a"):
        raise RuntimeError
    assert pool.num_free == 2


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2, owner="a")
    with pytest.raises(KvExhausted, match="3 KV blocks wanted, 2 of 4 are free"):
        pool.allocate(3, owner="b")
    before = table.block_ids
    with pytest.raises(KvExhausted):
        table.grow(3)
    assert table.block_ids == before
    assert pool.num_free == 2
    pool.check_integrity()


def test_keep_free_is_left_for_others() -> None:
    pool = BlockPool(4)
    with pytest.raises(KvExhausted):
        pool.allocate(3, owner="a", keep_free=2)
    table = pool.allocate(2, owner="a", keep_free=2)
    with pytest.raises(KvExhausted):
        table.grow(1, keep_free=2)
    table.grow(1, keep_free=1)
    assert pool.num_free == 1


def test_grown_blocks_keep_order_and_generation() -> None:
    pool = BlockPool(4)
    table = pool.allocate(1, owner="a")
    pool.allocate(1, owner="b")
    before = table.block_ids
    table.grow(2)
    assert table.block_ids[:1] == before
    assert {pool.generation_of(block_id) for block_id in table.block_ids} == {table.generation}
    pool.check_integrity()


def test_a_released_block_answers_another_generation() -> None:
    pool = BlockPool(1)
    first = pool.allocate(1, owner="a")
    (block_id,) = first.block_ids
    generation = first.generation
    assert pool.generation_of(block_id) == generation
    first.release()
    assert pool.generation_of(block_id) == FREE_GENERATION
    second = pool.allocate(1, owner="b")
    assert second.block_ids == (block_id,)
    assert pool.generation_of(block_id) not in (generation, FREE_GENERATION)


def test_unknown_blocks_have_no_generation() -> None:
    pool = BlockPool(2)
    for block_id in (-1, 2):
        with pytest.raises(StaleHandle):
            pool.generation_of(block_id)


def test_taking_over_moves_the_victims_blocks() -> None:
    pool = BlockPool(4)
    table, victim = pool.allocate(1, owner="a"), pool.allocate(3, owner="b")
    assert table.take_over([victim], 2) == [victim]
    assert len(table) == 3
    assert len(victim) == 0
    assert pool.num_free == 1
    assert {pool.generation_of(block_id) for block_id in table.block_ids} == {table.generation}
    pool.check_integrity()


def test_a_take_over_that_is_not_enough_changes_nothing() -> None:
    pool = BlockPool(4)
    table, victim = pool.allocate(1, owner="a"), pool.allocate(1, owner="b")
    pool.allocate(2, owner="c")
    with pytest.raises(KvExhausted, match="2 KV blocks wanted"):
        table.take_over([victim], 2)
    assert (len(table), len(victim), pool.num_free) == (1, 1, 0)
    pool.check_integrity()


def test_a_take_over_releases_the_first_that_are_enough_and_tells_of_what_is_left() -> None:
    pool = BlockPool(8)
    told: list[int] = []
    table = pool.allocate(1, owner="table")
    small, large, last = (pool.allocate(count, owner="victim") for count in (1, 4, 2))
    pool.add_free_listener(lambda: told.append(pool.num_free))
    assert table.take_over([small, large, last], 3) == [large], "without the first, the second is still enough"
    assert (len(small), len(table), pool.num_free, told) == (1, 4, 1, [1])
    assert table.take_over([small, last], 1) == []
    assert table.take_over([small, last], 2) == [last]
    pool.check_integrity()


def test_a_released_table_cannot_grow() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1, owner="a")
    table.release()
    with pytest.raises(IntegrityError):
        table.grow(1)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError):
        BlockPool(0)


def test_listeners_hear_of_freed_blocks_outside_the_lock() -> None:
    pool = BlockPool(2)
    told: list[int] = []
    pool.add_free_listener(lambda: told.append(len(pool.allocate(1, owner="listener"))))  # would deadlock inside
    pool.allocate(0, owner="empty").release()
    assert told == []
    pool.allocate(2, owner="a").release()
    assert told == [1]


def test_broken_books_are_noticed() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1, owner="a")
    pool._free.append(table.block_ids[0])
    with pytest.raises(IntegrityError, match="held by"):
        pool.check_integrity()
    pool._free.pop()
    lost = pool._free.pop()
    with pytest.raises(IntegrityError, match=f"nobody holds blocks \\[{lost}\\]"):
        pool.check_integrity()
    pool._free.append(lost)
    pool._generations[table.block_ids[0]] += 1
    with pytest.raises(IntegrityError, match="generation"):
        pool.check_integrity()


def test_many_threads_never_share_a_block() -> None:
    pool = BlockPool(32)
    holders: list[str | None] = [None] * 32
    ready = threading.Barrier(4)

    def churn(name: str) -> int:
        random = Random(name)
        ready.wait(timeout=10)
        exhausted = 0
        for _ in range(300):
            try:
                table = pool.allocate(random.randint(0, 12), owner=name)
            except KvExhausted:
                exhausted += 1
                continue
            with table:
                try:
                    table.grow(random.randint(0, 6))
                except KvExhausted:
                    exhausted += 1
                for block_id in table.block_ids:
                    assert holders[block_id] is None
                    holders[block_id] = name
                for block_id in table.block_ids:
                    assert holders[block_id] == name
                    assert pool.generation_of(block_id) == table.generation
                    holders[block_id] = None
        return exhausted

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(churn, "abcd"))
    pool.check_integrity()
    assert pool.num_free == 32


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool of 12 blocks, compared with a plain count."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.live: dict[int, BlockTable] = {}
        self.generations: set[int] = set()

    def held(self) -> int:
        return sum(len(table) for table in self.live.values())

    @rule(target=tables, count=st.integers(0, 6), keep_free=st.integers(0, 3))
    def allocate(self, count: int, keep_free: int) -> BlockTable | None:
        if self.held() + count + keep_free > 12:
            with pytest.raises(KvExhausted):
                self.pool.allocate(count, owner="x", keep_free=keep_free)
            return None
        table = self.pool.allocate(count, owner="x", keep_free=keep_free)
        assert table.generation not in self.generations
        self.generations.add(table.generation)
        self.live[id(table)] = table
        return table

    @rule(table=tables, count=st.integers(0, 4))
    def grow(self, table: BlockTable | None, count: int) -> None:
        if table is None or id(table) not in self.live:
            return
        before = table.block_ids
        if self.held() + count > 12:
            with pytest.raises(KvExhausted):
                table.grow(count)
            assert table.block_ids == before
        else:
            table.grow(count)
            assert table.block_ids[: len(before)] == before
            assert len(table) == len(before) + count

    @rule(table=consumes(tables))
    def release(self, table: BlockTable | None) -> None:
        if table is not None:
            table.release()
            self.live.pop(id(table), None)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 12 - self.held()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestPoolMachine = PoolMachine.TestCase


# --- division ---------------------------------------------------------------------------------------


def test_a_divided_table_is_shared_as_far_as_it_is_complete() -> None:
    pool = BlockPool(8)
    freed: list[int] = []
    pool.add_free_listener(lambda: freed.append(pool.num_free))
    table = pool.allocate(6, owner="all")
    blocks = table.block_ids
    first, second = table.divide(["first", "second"], 3, num_own=1)
    pool.check_integrity()
    assert (first.block_ids, second.block_ids) == ((*blocks[:3], blocks[3]), (*blocks[:3], blocks[4]))
    assert [pool.generation_of(block_id) for block_id in blocks[:3]] == [FREE_GENERATION] * 3, "nobody may write them"
    assert pool.generation_of(blocks[3]) == first.generation != second.generation == pool.generation_of(blocks[4])
    assert (pool.num_free, freed) == (3, [3]), "what was left over"
    table.release()
    first.release()
    pool.check_integrity()
    assert pool.num_free == 4
    second.release()
    assert pool.num_free == 8


def test_a_table_is_divided_among_nobody_or_not_at_all() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3, owner="all")
    with pytest.raises(IntegrityError, match="too few"):
        table.divide(["a", "b"], 2, num_own=1)
    assert len(table) == 3
    assert table.divide([], 2, num_own=1) == []
    assert pool.num_free == 4
    pool.check_integrity()


def test_blocks_that_were_divided_are_named_by_the_first_who_publishes_them() -> None:
    pool = BlockPool(8)
    names = PrefixHasher("layout", block_size=1).chain([1, 2, 3]).hashes
    parts = pool.allocate(3, owner="all").divide(["a", "b", "c"], 3, num_own=0)
    for part in parts[:2]:
        part.publish(0, names)
        pool.check_integrity()
    with pool.allocate(3, owner="later", prefix=names) as later:
        assert later.num_shared == 3
    for part in parts:
        part.release()
    assert (pool.num_cached, pool.num_free) == (3, 8)
    pool.check_integrity()


@pytest.mark.parametrize("how", ["withdraw", "reset"])
def test_blocks_that_were_divided_and_shall_not_be_known_stay_unknown(how: str) -> None:
    pool = BlockPool(8)
    names = PrefixHasher("layout", block_size=1).chain([1, 2]).hashes
    first, second = pool.allocate(2, owner="all").divide(["a", "b"], 2, num_own=0)
    if how == "withdraw":
        first.withdraw()
    else:
        pool.reset_prefix_cache()
    second.publish(0, names)
    pool.check_integrity()
    first.release()
    second.release()
    assert (pool.num_cached, pool.num_free) == (0, 8)
    pool.check_integrity()
