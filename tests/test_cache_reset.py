"""ResetPrefixCache while workers come and go: nobody serves with what it had before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from fake_workers import FakeCluster, FakeWorker, make_model, until
from router import discovery, reset_book
from router.cache_reset import reset_prefix_caches
from router.discovery import WorkerSource, parse_source
from router.reset_book import EVERYTHING, ResetBook, Scope
from router.workers import WorkerTable
from twinstage.errors import ComputeFailed, Unavailable
from twinstage.types import WorkerId


@contextlib.asynccontextmanager
async def table(*sources: str) -> AsyncIterator[WorkerTable]:
    workers = WorkerTable(report_interval_s=0.3, lookup_interval_s=0.1)
    workers.start([parse_source(source) for source in sources])
    try:
        yield workers
    finally:
        await workers.close()


def lives(workers: WorkerTable) -> set[str]:
    """The addresses at which somebody serves."""
    return {entry.address for entry in workers.entries if entry.life is not None}


async def until_serving(workers: WorkerTable, *expected: FakeWorker) -> None:
    addresses = {worker.address for worker in expected}
    await until(lambda: lives(workers) == addresses, what=f"{addresses} serving")


async def test_a_worker_that_is_being_connected_is_reset_before_it_serves() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        worker = cluster.prefill[0]
        bundle, resetting = worker.script.stall("bundle"), worker.script.stall("reset")
        async with table(worker.address) as workers:
            await worker.script.reached("bundle").wait()
            assert await reset_prefix_caches(workers) == []
            bundle.set()
            await worker.script.reached("reset").wait()
            assert not lives(workers)
            assert await reset_prefix_caches(workers) == []  # and once more, in the middle of the first
            resetting.set()
            await until_serving(workers, worker)
            assert worker.resets == 2


async def test_a_worker_that_was_never_heard_of_is_reset_before_it_serves() -> None:
    async with FakeCluster(prefill=1, decode=1) as cluster:
        late = cluster.decode[0]
        await late.kill()
        async with table(*cluster.addresses) as workers:
            await until_serving(workers, cluster.prefill[0])
            assert await reset_prefix_caches(workers) == [("prefill-0", 5)]
            await late.start()
            await until_serving(workers, *cluster.workers)
            assert late.resets == 1


async def test_a_worker_that_leaves_discovery_and_comes_back_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        worker = cluster.prefill[0]
        known = {worker.address}

        async def look_up(source: WorkerSource) -> frozenset[str]:
            return frozenset(known)

        monkeypatch.setattr(discovery, "look_up", look_up)
        async with table("dns:///workers.example:1") as workers:
            await until_serving(workers, worker)
            known.clear()
            await worker.kill()
            await until(lambda: not workers.entries, what="the worker has left")
            assert await reset_prefix_caches(workers) == []
            await worker.start()  # with all that it had
            known.add(worker.address)
            await until_serving(workers, worker)
            assert worker.resets == 1


async def test_a_worker_that_had_its_reset_keeps_its_cache_when_it_comes_back() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster, table(*cluster.addresses) as workers:
        worker = cluster.prefill[0]
        await until_serving(workers, worker)
        assert await reset_prefix_caches(workers) == [("prefill-0", 5)]
        await worker.kill()
        await until_serving(workers)
        await worker.start()
        await until_serving(workers, worker)
        assert worker.resets == 1


async def test_a_worker_that_is_lost_during_a_reset_owes_it() -> None:
    async with FakeCluster(prefill=1, decode=1) as cluster, table(*cluster.addresses) as workers:
        prefill, decode = cluster.workers
        await until_serving(workers, prefill, decode)
        go_on = prefill.script.stall("reset")
        call = asyncio.create_task(reset_prefix_caches(workers))
        await prefill.script.reached("reset").wait()
        await decode.kill()
        await until_serving(workers, prefill)
        go_on.set()
        assert await call == [("prefill-0", 5)]
        await decode.start()
        await until_serving(workers, prefill, decode)
        assert (prefill.resets, decode.resets) == (1, 1)


async def test_a_worker_that_fails_is_named_and_told_again_and_all_others_are_told_nevertheless() -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster, table(*cluster.addresses) as workers:
        failing, prefill, decode = cluster.workers
        await until_serving(workers, *cluster.workers)
        failing.script.fail("reset", ComputeFailed("no"), times=2)
        with pytest.raises(
            Unavailable, match=r"1 of 3 workers have not .* prefill-0 \(no\); the router tells them again"
        ):
            await reset_prefix_caches(workers)
        assert (failing.resets, prefill.resets, decode.resets) == (0, 1, 1)
        # The decode worker may have taken old blocks after its reset, from the one that failed.
        await until(lambda: decode.resets == 2, what="all told")
        assert (failing.resets, prefill.resets) == (1, 1)


async def test_a_worker_that_failed_and_is_gone_is_told_when_it_comes_back() -> None:
    async with FakeCluster(prefill=1, decode=1) as cluster, table(*cluster.addresses) as workers:
        failing, decode = cluster.workers
        await until_serving(workers, *cluster.workers)
        go_on = [failing.script.stall("reset", then=ComputeFailed("no")) for _ in range(2)]
        go_on[0].set()
        with pytest.raises(Unavailable, match="1 of 2 workers"):
            await reset_prefix_caches(workers)
        await failing.kill()
        await until_serving(workers, decode)
        await until(lambda: decode.resets == 2, what="nobody else owing")
        await failing.start()
        await until_serving(workers, *cluster.workers)
        assert failing.resets == 1


async def test_a_reset_of_one_model_or_worker_is_owed_by_nobody_else() -> None:
    other_model = make_model(name="other", fingerprint="m2")
    async with (
        FakeCluster(prefill=2, decode=0) as first,
        FakeCluster(prefill=1, decode=0, model=other_model, prefix="other-") as second,
        table(*first.addresses, *second.addresses) as workers,
    ):
        everybody = [*first.workers, *second.workers]
        await until_serving(workers, *everybody)
        for worker in everybody:
            await worker.kill()
        await until_serving(workers)
        assert await reset_prefix_caches(workers, model="other") == []
        assert await reset_prefix_caches(workers, worker_id="prefill-1") == []
        for worker in everybody:
            await worker.start()
        await until_serving(workers, *everybody)
        assert [worker.resets for worker in everybody] == [0, 1, 1]


def test_what_the_book_forgets_costs_a_reset_more_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_book, "MAX_SCOPES", 2)
    monkeypatch.setattr(reset_book, "MAX_WORKERS", 2)
    book, description = ResetBook(), FakeCluster(prefill=1).prefill[0].description
    workers = [replace(description, worker_id=WorkerId(f"w{index}")) for index in range(3)]
    for index in range(2):
        book.ask(Scope(worker_id=f"w{index}"))
    assert [bool(book.owed(worker)) for worker in workers] == [True, True, False]
    book.ask(Scope(worker_id="w0"))
    book.ask(Scope(model="other"))
    assert [bool(book.owed(worker)) for worker in workers] == [True, True, True], "too many scopes: everybody"
    for worker in workers:
        book.had(worker, book.owed(worker))
    assert [bool(book.owed(worker)) for worker in workers] == [True, False, False]
    book.ask(EVERYTHING)
    assert all(book.owed(worker) for worker in workers)
    assert not ResetBook().owed(description)
