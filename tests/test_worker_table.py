"""The worker table: states, reconnecting, pairing, and discovery by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from fake_workers import FakeCluster, make_bundle, make_model, until
from router import discovery
from router.discovery import WorkerSource, parse_source
from router.pairing import Pairing, choose_pairing, disagreement
from router.worker_entry import WorkerEntry, WorkerState
from router.workers import WorkerTable
from twinstage.errors import ConfigError, NotFound, NoWorker, WorkerLost
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.types import WorkerLoad


@contextlib.asynccontextmanager
async def table(*sources: str | WorkerSource, interval_s: float = 0.3) -> AsyncIterator[WorkerTable]:
    workers = WorkerTable(report_interval_s=interval_s, lookup_interval_s=0.1)
    workers.start([parse_source(source) if isinstance(source, str) else source for source in sources])
    try:
        yield workers
    finally:
        await workers.close()


def entry(workers: WorkerTable, address: str) -> WorkerEntry:
    return next(entry for entry in workers.entries if entry.address == address)


async def until_state(workers: WorkerTable, address: str, state: WorkerState) -> None:
    await until(
        lambda: any(entry.address == address and entry.state is state for entry in workers.entries),
        what=f"{address} {state.value}",
    )


async def test_workers_are_described_and_ready() -> None:
    async with FakeCluster() as cluster, table(*cluster.addresses) as workers:
        for worker in cluster.workers:
            await until_state(workers, worker.address, WorkerState.READY)
            assert entry(workers, worker.address).description == worker.description
        model = workers.models["fake"]
        assert model.ready
        assert model.tokenizer.bundle == cluster.bundle
        assert (len(model.prefill), len(model.decode)) == (1, 1)


async def test_a_table_that_is_closed_loses_nobody() -> None:
    async with FakeCluster() as cluster:
        async with table(*cluster.addresses) as workers:
            for worker in cluster.workers:
                await until_state(workers, worker.address, WorkerState.READY)
            with capture_logs() as logs:
                await workers.close()
        assert "worker lost" not in {entry["event"] for entry in logs}


async def test_model_needs_both_roles_but_an_embedding_model_only_one() -> None:
    embedding = make_model(name="embedder", task=make_model().task.EMBED)
    async with (
        FakeCluster(prefill=1, decode=0) as generation,
        FakeCluster(prefill=1, decode=0, model=embedding, prefix="e-") as embedder,
        table(*generation.addresses, *embedder.addresses) as workers,
    ):
        await until(lambda: len(workers.models) == 2, what="both models")
        assert not workers.models["fake"].ready
        assert workers.models["embedder"].ready


async def test_worker_that_is_not_there_yet_is_connecting_and_comes() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        worker = cluster.prefill[0]
        await worker.kill()
        async with table(worker.address) as workers:
            await until(lambda: entry(workers, worker.address).detail, what="a failed attempt")
            assert entry(workers, worker.address).state is WorkerState.CONNECTING
            with pytest.raises(NoWorker, match=worker.address):
                workers.find_model("other", work=None)  # it may be what that worker serves
            await worker.start()
            await until_state(workers, worker.address, WorkerState.READY)
            with pytest.raises(NotFound):
                workers.find_model("other", work=None)


async def test_killed_worker_is_lost_and_comes_back_as_another() -> None:
    async with FakeCluster() as cluster, table(*cluster.addresses) as workers:
        worker = cluster.decode[0]
        await until_state(workers, worker.address, WorkerState.READY)
        first = entry(workers, worker.address).life
        assert first is not None
        await worker.kill()
        await until_state(workers, worker.address, WorkerState.LOST)
        with pytest.raises(WorkerLost):
            workers.life(first.key)
        await until(lambda: not workers.models["fake"].decode, what="the model lost its worker")
        await worker.restart()
        await until_state(workers, worker.address, WorkerState.READY)
        second = entry(workers, worker.address).life
        assert second is not None
        assert second.key.epoch == first.key.epoch + 1


async def test_silence_for_three_intervals_is_a_loss() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster, table(*cluster.addresses, interval_s=0.1) as workers:
        worker = cluster.prefill[0]
        await until_state(workers, worker.address, WorkerState.READY)
        worker.script.stall("load")
        await until_state(workers, worker.address, WorkerState.LOST)
        assert "silent" in entry(workers, worker.address).detail
        await until_state(workers, worker.address, WorkerState.READY)


async def test_draining_worker_takes_nothing_new() -> None:
    async with FakeCluster() as cluster, table(*cluster.addresses) as workers:
        for worker in cluster.workers:
            await until_state(workers, worker.address, WorkerState.READY)
        worker = cluster.prefill[0]
        worker.report(WorkerLoad(draining=True))
        await until_state(workers, worker.address, WorkerState.DRAINING)
        assert not workers.models["fake"].ready
        assert not workers.snapshot(workers.models["fake"]).prefill
        worker.report(WorkerLoad(draining=False))
        await until_state(workers, worker.address, WorkerState.READY)


async def test_worker_of_another_revision_is_refused_until_the_others_are_gone() -> None:
    async with (
        FakeCluster() as cluster,
        FakeCluster(prefill=1, decode=0, model=make_model(fingerprint="m2"), prefix="new-") as other,
        table(*cluster.addresses, *other.addresses) as workers,
    ):
        # Whichever came first serves; begin with the older ones.
        await until(lambda: all(entry.life is not None for entry in workers.entries), what="all connected")
        await until(
            lambda: {entry.state for entry in workers.entries} == {WorkerState.READY, WorkerState.REFUSED},
            what="one side refused",
        )
        refused = [entry for entry in workers.entries if entry.state is WorkerState.REFUSED]
        assert "the model's fingerprint is m" in refused[0].shown_detail
        serving = {entry.address for entry in workers.entries if entry.state is WorkerState.READY}
        model = workers.models["fake"]
        for worker in (*cluster.workers, *other.workers):
            if worker.address in serving:
                await worker.kill()
        for entry_ in refused:
            await until_state(workers, entry_.address, WorkerState.READY)
        # A request that was admitted for the old revision finds nobody any more.
        assert not workers.snapshot(model).prefill
        assert not workers.snapshot(model).decode


async def test_first_group_stays_although_a_larger_one_joins() -> None:
    async with (
        FakeCluster(prefill=1, decode=1) as first,
        FakeCluster(prefill=2, decode=2, layout="other", prefix="b-") as second,
    ):
        workers = WorkerTable(report_interval_s=0.3)
        workers.start([parse_source(address) for address in first.addresses])
        try:
            for worker in first.workers:
                await until_state(workers, worker.address, WorkerState.READY)
            workers.start([parse_source(address) for address in second.addresses])
            for worker in second.workers:
                await until_state(workers, worker.address, WorkerState.REFUSED)
                assert "KV layout" in entry(workers, worker.address).shown_detail
            assert len(workers.models["fake"].decode) == 1
        finally:
            await workers.close()


async def test_a_deterministic_worker_is_not_paired_with_an_ordinary_one() -> None:
    async with FakeCluster(prefill=1, decode=1) as first, FakeCluster(prefill=0, decode=2, prefix="other-") as others:
        one, two = others.decode
        fixed = "Transformers modules, chunks of 512, threads 1, trial a1"
        for worker in (*first.workers, two):
            worker.description = replace(worker.description, numerics=fixed)
        two.description = replace(two.description, numerics=fixed.replace("threads 1", "threads 2"))
        async with table(*first.addresses) as workers:
            for worker in first.workers:
                await until_state(workers, worker.address, WorkerState.READY)
            workers.start([parse_source(address) for address in others.addresses])
            for worker in others.workers:
                await until_state(workers, worker.address, WorkerState.REFUSED)
            detail = entry(workers, one.address).shown_detail
            assert f"bits of results is not fixed (no --deterministic), theirs is {fixed}" in detail
            assert "threads 2, trial a1, theirs is" in entry(workers, two.address).shown_detail
            assert len(workers.models["fake"].decode) == 1


async def test_other_protocol_version_is_refused_by_name() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        worker = cluster.prefill[0]
        worker.description = replace(worker.description, protocol_version=PROTOCOL_VERSION + 1)
        async with table(worker.address) as workers:
            await until_state(workers, worker.address, WorkerState.REFUSED)
            assert f"speaks version {PROTOCOL_VERSION + 1}" in entry(workers, worker.address).shown_detail
            worker.description = replace(worker.description, protocol_version=PROTOCOL_VERSION)
            await until_state(workers, worker.address, WorkerState.READY)


async def test_wrong_tokenizer_bundle_is_refused() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        cluster.prefill[0].bundle = make_bundle(max_input_tokens=9)
        async with table(cluster.prefill[0].address) as workers:
            await until_state(workers, cluster.prefill[0].address, WorkerState.REFUSED)
            assert "tokenizer bundle" in entry(workers, cluster.prefill[0].address).shown_detail


async def test_one_worker_by_two_addresses_counts_once() -> None:
    async with FakeCluster(prefill=1, decode=0) as cluster:
        address = cluster.prefill[0].address
        alias = address.replace("127.0.0.1", "localhost")
        async with table(address, alias) as workers:
            await until(
                lambda: sorted(entry.state.value for entry in workers.entries) == ["ready", "refused"],
                what="one of the two refused",
            )
            assert len(workers.models["fake"].prefill) == 1


async def test_name_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address of a name is dialled; a new one joins; one that vanished is kept until it is lost."""
    async with FakeCluster(prefill=3, decode=0) as cluster:
        addresses = [worker.address for worker in cluster.prefill]
        known: set[str] = set(addresses[:2])

        async def look_up(source: WorkerSource) -> frozenset[str]:
            if not known:
                raise OSError("the name server is away")
            return frozenset(known)

        monkeypatch.setattr(discovery, "look_up", look_up)
        async with table("dns:///workers.example:50052") as workers:
            for address in addresses[:2]:
                await until_state(workers, address, WorkerState.READY)
            known.clear()  # look-ups fail: nothing changes
            await asyncio.sleep(0.4)
            assert len(workers.models["fake"].prefill) == 2
            known.update(addresses[1:])
            await until_state(workers, addresses[2], WorkerState.READY)
            await until(lambda: not entry(workers, addresses[0]).wanted, what="the first address has vanished")
            assert entry(workers, addresses[0]).state is WorkerState.READY
            await cluster.prefill[0].kill()
            await until(lambda: len(workers.entries) == 2, what="it is dropped when lost")


async def test_address_that_a_name_has_lost_stays_while_somebody_else_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(prefill=2, decode=0) as cluster:
        both = [worker.address for worker in cluster.prefill]
        names = {"old.example": set(both), "new.example": {both[1]}}

        async def look_up(source: WorkerSource) -> frozenset[str]:
            return frozenset(names[source.host])

        monkeypatch.setattr(discovery, "look_up", look_up)
        await cluster.prefill[0].kill()  # what vanishes is dropped at once
        await cluster.prefill[1].kill()
        async with table("dns:///old.example:1", "dns:///new.example:1", both[0]) as workers:
            await until(lambda: len(workers.entries) == 2, what="both addresses")
            await until(lambda: len(entry(workers, both[1]).wanted_by) == 2, what="both names")
            names["old.example"].clear()
            await until(lambda: all(len(entry.wanted_by) == 1 for entry in workers.entries), what="a name lost both")
            await asyncio.sleep(0.3)
            assert {entry.address for entry in workers.entries} == set(both)
            names["new.example"].clear()
            await until(lambda: [entry.address for entry in workers.entries] == [both[0]], what="the flag alone")


async def test_a_bug_does_not_end_the_watch_over_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    def on_addresses(addresses: frozenset[str]) -> None:
        heard.put_nowait(addresses)
        if heard.qsize() == 1:
            raise ValueError("a bug")

    async def look_up(source: WorkerSource) -> frozenset[str]:
        return frozenset({source.address})

    monkeypatch.setattr(discovery, "look_up", look_up)
    monkeypatch.setattr(discovery, "MIN_LOOKUP_INTERVAL_S", 0.0)
    watcher = discovery.NameWatcher(parse_source("dns:///x:1"), interval_s=0.001, on_addresses=on_addresses)
    watching = asyncio.create_task(watcher.run())
    await until(lambda: heard.qsize() > 1 or watching.done(), what="it looks again")
    assert not watching.done()
    watching.cancel()


async def test_real_look_up_finds_every_address() -> None:
    addresses = await discovery.look_up(parse_source("dns:///localhost:50052"))
    assert "127.0.0.1:50052" in addresses


@pytest.mark.parametrize(
    "value",
    [
        *("host", "host:", ":1", "host:0", "host:70000"),
        *("dns:///:1", "dns://x/host:1", "a/b:1", "dns:///a..b:1", f"{'x' * 64}.y:1"),
    ],
)
def test_wrong_sources_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port or dns:///name:port"):
        parse_source(value)


def test_sources() -> None:
    assert parse_source("[::1]:50051").address == "[::1]:50051"
    assert parse_source("worker:7").address == "worker:7"
    assert parse_source("dns:///workers:7").is_dns_name


def test_choice_of_pairings() -> None:
    a = Pairing(
        task="t", model_fingerprint="a", tokenizer_fingerprint="t", kv_layout_fingerprint="k", protocol_version=1
    )
    b = replace(a, model_fingerprint="b")
    assert choose_pairing(None, []) is None
    assert choose_pairing(a, []) is None
    assert choose_pairing(None, [b, a, a]) == a
    assert choose_pairing(b, [b, a, a]) == b
    assert choose_pairing(None, [b, a]) == b
    assert disagreement(b, a) == "does not fit the model's other workers: the model's fingerprint is b, theirs is a"
