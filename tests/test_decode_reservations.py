"""What a decode worker lets in: requests that wait for KV blocks, their order, their ends and their limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn

import pytest

from decode_bench import BLOCK_SIZE, make_spec, open_bench
from decode_worker.grants import MAX_TOKENS_NAMED_AT_ONCE, block_names
from decode_worker.reservations import Reservations, Wish
from twinstage.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Draining,
    IntegrityError,
    InternalError,
    InvalidRequest,
    KvExhausted,
    TwinstageError,
)
from twinstage.kv.block_pool import BlockPool, BlockTable
from twinstage.kv.prefix_index import BlockHash, HashChain, PrefixHasher, PrefixIndex
from twinstage.types import RequestId, SequenceSpec


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with open_bench(num_blocks=4) as bench:
        bench.worker.open_session("s")
        cases: list[tuple[SequenceSpec, type[TwinstageError]]] = [
            (make_spec(0), InvalidRequest),
            (make_spec(256), InvalidRequest),
            (make_spec(16), KvExhausted),  # fills the pool; the next token has no place
            (make_spec(4, max_tokens=2, resumed=(1, 2)), InvalidRequest),
        ]
        for spec, error in cases:
            with pytest.raises(error):
                await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.all_blocks_free()
        with pytest.raises(AlreadyExists):
            bench.worker.open_session("s")


async def test_a_full_pool_serves_reservations_in_order_as_blocks_return() -> None:
    async with open_bench(num_blocks=8) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(32 - BLOCK_SIZE, request_id="holder"), timeout_s=60.0)
        await bench.worker.reserve("s", make_spec(BLOCK_SIZE, request_id="other"), timeout_s=60.0)
        order: list[str] = []

        async def reserve(name: str, length: int) -> None:
            await bench.worker.reserve("s", make_spec(length, request_id=name), timeout_s=60.0)
            order.append(name)

        large = asyncio.ensure_future(reserve("large", 24))
        small = asyncio.ensure_future(reserve("small", 4))
        await asyncio.sleep(0.05)
        assert order == []
        assert (await anext(bench.worker.loads.watch(1.0))).waiting == 2
        bench.worker.abort(session, RequestId("holder"))
        await asyncio.gather(large, small)
        assert order == ["large", "small"]


async def test_a_reservation_waits_until_its_deadline() -> None:
    async with open_bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(8, request_id="holder"), timeout_s=60.0)
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await bench.worker.reserve("s", make_spec(12), timeout_s=0.1)
        assert 0.09 < asyncio.get_running_loop().time() - started_s < 5
        bench.worker.abort(session, RequestId("holder"))
        await bench.all_blocks_free()


async def test_a_cancelled_reservation_lets_the_next_one_through() -> None:
    async with open_bench(num_blocks=4) as bench:
        bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(8, request_id="holder"), timeout_s=60.0)
        large = asyncio.ensure_future(bench.worker.reserve("s", make_spec(12), timeout_s=60.0))
        small = asyncio.ensure_future(bench.worker.reserve("s", make_spec(8), timeout_s=60.0))
        await asyncio.sleep(0)
        large.cancel()
        async with asyncio.timeout(5):
            grant, _ = await small
        assert len(grant.block_ids) == 2


def _reservations(pool: BlockPool, *, headroom: Callable[[], int] = lambda: 0) -> Reservations[BlockTable]:
    return Reservations(
        pool,
        may_take=lambda: True,
        headroom=headroom,
        give_up=lambda table: table.release(),
        on_change=lambda: None,
    )


def _wish(num_blocks: int, name: str = "r") -> Wish:
    return Wish(request_id=RequestId(name), session_id="s", owner=RequestId(name), num_blocks=num_blocks)


def _wait_in_line(
    reservations: Reservations[BlockTable], wishes: dict[str, int], order: list[str], **options: int
) -> list[asyncio.Task[None]]:
    """Tasks that wait for blocks, keep them, and enter their names into `order`."""

    async def take(name: str, num_blocks: int) -> None:
        wish = replace(_wish(num_blocks, name), **options)  # type: ignore[arg-type]
        tables.append(await reservations.take(wish, lambda table: table, timeout_s=60.0))
        order.append(name)

    tables: list[BlockTable] = []
    return [asyncio.create_task(take(name, num_blocks)) for name, num_blocks in wishes.items()]


async def test_a_failure_of_any_kind_frees_the_blocks_and_fails_that_reservation_alone() -> None:
    pool = BlockPool(16)
    holder = pool.allocate(16, owner="holder")
    reservations = _reservations(pool)

    def fail(_table: BlockTable) -> NoReturn:
        raise KeyError("a bug")

    failing = asyncio.ensure_future(reservations.take(_wish(10, "failing"), fail, timeout_s=60.0))
    after_it = asyncio.ensure_future(reservations.take(_wish(16, "after it"), lambda table: table, timeout_s=5.0))
    await asyncio.sleep(0)
    holder.release()
    reservations.serve()
    with pytest.raises(InternalError):
        await failing
    (await after_it).release()
    assert len(reservations) == 0
    assert pool.num_free == 16


async def test_a_large_reservation_neither_holds_up_small_ones_nor_is_starved_by_them() -> None:
    """A pool of 16 with 10 blocks held. 12 are wanted first; small ones pass until they have had as many."""
    pool = BlockPool(16)
    holder = pool.allocate(10, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    tasks = _wait_in_line(reservations, {"large": 12}, order)
    await asyncio.sleep(0)
    small = 0

    async def take_and_return() -> None:
        nonlocal small
        table = await reservations.take(_wish(2, "small"), lambda table: table, timeout_s=60.0)
        small += 1
        order.append("small")
        await asyncio.sleep(0)
        table.release()
        reservations.serve()

    for _ in range(20):  # there is always another one
        tasks.append(asyncio.create_task(take_and_return()))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert small == 6, "as many blocks as the large one wants, and no more"
    assert order == ["small"] * 6
    assert pool.num_free == 6
    holder.release()
    reservations.serve()
    await asyncio.gather(*tasks)
    assert order[6] == "large"
    assert len(reservations) == 0


async def test_reservations_of_higher_priority_come_first() -> None:
    pool = BlockPool(4)
    holder = pool.allocate(4, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    tasks = _wait_in_line(reservations, {"a": 1, "b": 1}, order)
    await asyncio.sleep(0)
    tasks += _wait_in_line(reservations, {"urgent": 1}, order, priority=1)
    tasks += _wait_in_line(reservations, {"background": 1}, order, priority=-1)
    await asyncio.sleep(0)
    holder.release()
    reservations.serve()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "a", "b", "background"]


async def test_cancelled_reservations_leave_the_queue_at_once() -> None:
    """A thousand that were given up are not looked at any more when blocks come back."""
    pool = BlockPool(2)
    holder = pool.allocate(2, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    given_up = _wait_in_line(reservations, {f"r{number}": 2 for number in range(1000)}, order)
    await asyncio.sleep(0)
    patient = _wait_in_line(reservations, {"patient": 2}, order)
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert len(reservations) == 1
    holder.release()
    reservations.serve()
    await asyncio.gather(*patient)
    assert order == ["patient"]


@pytest.mark.parametrize("ending", ["cancel", "deadline"])
async def test_blocks_that_came_in_the_moment_of_the_end_go_back(ending: str) -> None:
    pool = BlockPool(4)
    reservations = _reservations(pool)
    holder = pool.allocate(4, owner="holder")
    timeout_s = 0.05 if ending == "deadline" else 60.0
    waiting = asyncio.ensure_future(reservations.take(_wish(2), lambda table: table, timeout_s=timeout_s))
    await asyncio.sleep(0)
    if ending == "deadline":
        time.sleep(0.06)  # noqa: ASYNC251 - the event loop must find both at once: the blocks and the end
    holder.release()
    reservations.serve()  # the blocks are given,
    assert pool.num_free == 2
    if ending == "cancel":
        waiting.cancel()  # and nobody is there any more to take them
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        result = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(result, BlockTable):
            result.release()
        else:
            assert isinstance(result, DeadlineExceeded)
    assert pool.num_free == 4
    assert len(reservations) == 0
    pool.check_integrity()


async def test_blocks_that_cannot_be_used_go_back_and_the_next_one_is_served() -> None:
    pool = BlockPool(4)
    reservations: Reservations[int] = Reservations(
        pool,
        may_take=lambda: True,
        headroom=lambda: 0,
        give_up=lambda reserved: None,
        on_change=lambda: None,
    )
    wish = Wish(request_id=RequestId("r"), session_id="s", owner=RequestId("r#1"), num_blocks=4)

    def use(table: BlockTable) -> int:
        raise IntegrityError("the grant was refused")

    with pytest.raises(IntegrityError, match="refused"):
        await reservations.take(wish, use, timeout_s=5.0)
    assert pool.num_free == 4
    assert await reservations.take(wish, len, timeout_s=5.0) == 4


async def test_the_queue_of_reservations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.reservations.MAX_WAITING", 2)
    pool = BlockPool(1)
    holder = pool.allocate(1, owner="holder")
    reservations = _reservations(pool)
    waiting = [
        asyncio.ensure_future(reservations.take(_wish(1, name), lambda table: table, timeout_s=60.0)) for name in "ab"
    ]
    await asyncio.sleep(0)
    with pytest.raises(KvExhausted):
        await reservations.take(_wish(1, "c"), lambda table: table, timeout_s=60.0)
    reservations.refuse(Draining("over"))
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, Draining)
    holder.release()
    assert len(reservations) == 0


async def test_a_long_prompt_that_waits_is_looked_up_only_when_the_pool_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[int] = []
    match = PrefixIndex.match

    def counting(index: PrefixIndex, hashes: Sequence[BlockHash], *, multiple: int = 1) -> list[int]:
        lookups.append(len(hashes))
        return match(index, hashes, multiple=multiple)

    pool = BlockPool(600)
    hasher = PrefixHasher("layout", block_size=BLOCK_SIZE)
    holders = [pool.allocate(count, owner="holder") for count in (500, 50, 50)]
    running = 2
    reservations = _reservations(pool, headroom=lambda: running)
    monkeypatch.setattr(PrefixIndex, "match", counting)
    wish = replace(_wish(500), hashes=hasher.chain(range(2000)))
    waiting = asyncio.ensure_future(reservations.take(wish, lambda table: table, timeout_s=60.0))
    await asyncio.sleep(0)
    for _ in range(100):  # each step of the engine asks
        reservations.serve()
    assert lookups == [500]
    holders[1].release()
    for _ in range(100):
        reservations.serve()
    holders[0].publish(0, hasher.chain(range(2000)).hashes[:449])
    for _ in range(100):
        reservations.serve()
    assert lookups == [500] * 3
    running = 1  # 51 blocks and one to stay free are too many still
    reservations.serve()
    holders[2].release()
    reservations.serve()
    assert lookups == [500] * 5
    assert (await waiting).num_shared == 449


async def test_a_long_prompt_is_named_beside_the_event_loop_and_a_short_one_at_once() -> None:
    threads: list[str] = []

    class Noting(PrefixHasher):
        def chain(self, token_ids: Sequence[int] = (), *, salt: str = "") -> HashChain:
            threads.append(threading.current_thread().name)
            return super().chain(token_ids, salt=salt)

    hasher = Noting("layout", block_size=BLOCK_SIZE)
    for extra in (0, 1):
        spec = replace(make_spec(), prompt_token_ids=tuple(range(MAX_TOKENS_NAMED_AT_ONCE - 1)), resumed_token_ids=(1,))
        spec = replace(spec, resumed_token_ids=(1,) * (1 + extra), cache_salt="salt")
        names = await block_names(spec, hasher)
        known = [*spec.prompt_token_ids, *spec.resumed_token_ids]
        assert names is not None
        assert names.hashes == PrefixHasher("layout", block_size=BLOCK_SIZE).chain(known, salt="salt").hashes
    assert [name == threading.current_thread().name for name in threads] == [True, False]


async def test_a_worker_that_begins_to_drain_while_a_prompt_is_named_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_worker.grants.MAX_TOKENS_NAMED_AT_ONCE", 0)
    async with open_bench(caches=True) as bench:
        bench.worker.open_session("s")
        reserving = asyncio.ensure_future(bench.worker.reserve("s", make_spec(), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.begin_drain()
        with pytest.raises(Draining):
            await reserving
        await bench.all_blocks_free()


async def test_running_sequences_keep_room_to_grow() -> None:
    pool = BlockPool(4)
    running = 2
    reservations = _reservations(pool, headroom=lambda: running)
    waiting = asyncio.ensure_future(reservations.take(_wish(3), lambda table: table, timeout_s=60.0))
    await asyncio.sleep(0)
    assert pool.num_free == 4
    running = 1
    reservations.serve()
    (await waiting).release()


async def test_an_abort_ends_a_reservation_that_waits() -> None:
    async with open_bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(8, request_id="holder"), timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", make_spec(12), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.abort(session, RequestId("r"))
        with pytest.raises(Cancelled):
            await waiting
        bench.worker.abort(session, RequestId("holder"))
        await bench.all_blocks_free()


async def test_load_watchers_see_reservations_wait() -> None:
    async with open_bench(num_blocks=4) as bench, aclosing(bench.worker.loads.watch(30.0)) as loads:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(8, request_id="holder"), timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", make_spec(12), timeout_s=60.0))
        async with asyncio.timeout(5):
            while (await anext(loads)).waiting != 1:
                pass
        bench.worker.abort(session, RequestId("holder"))
        async with asyncio.timeout(5):
            while (await anext(loads)).waiting != 0:
                pass
        await waiting
