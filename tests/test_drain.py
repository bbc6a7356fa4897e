"""Draining by an operator, as the router does it: over real gRPC, on workers without a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from fake_workers import FakeCluster, FakePrefill, until
from router.__main__ import Router
from router.config import RouterSettings
from router.worker_entry import WorkerState
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.settings import read_settings
from twinstage.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

DRAINING, READY = admin_pb2.WORKER_STATE_DRAINING, admin_pb2.WORKER_STATE_READY


@contextlib.asynccontextmanager
async def routed(cluster: FakeCluster) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a router of these workers."""
    workers = [argument for address in cluster.addresses for argument in ("--workers", address)]
    flags = ["--listen", "127.0.0.1:0", "--report-interval", "0.3", *workers]
    router = Router(read_settings(RouterSettings, flags))
    await router.start()
    try:
        connecting = WorkerState.CONNECTING
        await until(lambda: all(entry.state is not connecting for entry in router.workers.entries), what="all known")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
            yield channel
    finally:
        await router.stop()


async def listed(channel: grpc.aio.Channel, worker_id: str) -> admin_pb2.Worker:
    stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
    workers = (await stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)).workers
    return next(worker for worker in workers if worker.id == worker_id)


async def drain(channel: grpc.aio.Channel, worker_id: str, *, wait: bool = False, timeout_s: float = 5) -> Any:
    stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
    request = admin_pb2.DrainWorkerRequest(worker_id=worker_id, wait=wait)
    return (await stub.DrainWorker(request, timeout=timeout_s)).worker


async def undrain(channel: grpc.aio.Channel, worker_id: str, *, timeout_s: float = 5) -> Any:
    stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
    return (await stub.UndrainWorker(admin_pb2.UndrainWorkerRequest(worker_id=worker_id), timeout=timeout_s)).worker


async def generate(channel: grpc.aio.Channel, count: int) -> None:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    for _ in range(count):
        await stub.Generate(generation_pb2.GenerateRequest(prompt="ab"), timeout=5)


async def test_a_drained_worker_gets_nothing_until_it_is_undrained() -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster, routed(cluster) as channel:
        first, second = cluster.prefill
        assert (await drain(channel, "prefill-0")).state == DRAINING
        assert (await drain(channel, "prefill-0")).state == DRAINING  # again: nothing else happens
        assert (await listed(channel, "prefill-0")).state == DRAINING
        await generate(channel, 4)
        assert (first.served, second.served) == (0, 4)
        assert (await undrain(channel, "prefill-0")).state == READY
        await generate(channel, 4)
        assert first.served > 0


async def test_waiting_ends_with_the_last_request_and_not_before() -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster, routed(cluster) as channel:
        first = cluster.prefill[0]
        first.report(replace(first.load, unfinished=2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(channel, "prefill-0", wait=True, timeout_s=0.6)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "2 requests were left" in (caught.value.details() or "")
        waiting = asyncio.create_task(drain(channel, "prefill-0", wait=True))
        first.report(replace(first.load, unfinished=1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert (await listed(channel, "prefill-0")).unfinished == 1
        first.report(replace(first.load, unfinished=0))
        worker = await waiting
        assert (worker.state, worker.unfinished) == (DRAINING, 0)


async def test_at_the_deadline_the_words_say_what_was_waited_for() -> None:
    """The router answers before the caller's deadline, whose own words are none: the call to the worker included."""
    cases: tuple[tuple[Any, str, str], ...] = (
        (drain, "drain", "was told to drain, and had not answered"),
        (drain, "load", "was told to drain, and had not reported"),
        (undrain, "undrain", "was told to take requests again, and had not answered"),
        (undrain, "load", "was told to take requests again, and had not reported"),
    )
    for call, phase, words in cases:
        async with FakeCluster(prefill=1, decode=1) as cluster, routed(cluster) as channel:
            worker = cluster.prefill[0]
            if call is undrain:
                await drain(channel, "prefill-0")
            go_on = worker.script.stall(phase)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "prefill-0", timeout_s=0.8)
            go_on.set()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert words in (caught.value.details() or "")


@pytest.mark.parametrize("how", ["undrained", "ended"])
async def test_who_waits_for_a_drain_hears_of_its_end(how: str) -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster, routed(cluster) as channel:
        first = cluster.prefill[0]
        first.report(replace(first.load, unfinished=2))
        waiting = asyncio.create_task(drain(channel, "prefill-0", wait=True))
        await until(lambda: first.load.draining, what="it drains")
        if how == "undrained":
            await undrain(channel, "prefill-0")
            assert (await waiting).state == READY
        else:
            await first.kill()
            assert (await waiting).state == admin_pb2.WORKER_STATE_LOST


async def test_who_cannot_be_drained_is_named() -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster, routed(cluster) as channel:
        await drain(channel, "prefill-0")
        await cluster.prefill[0].kill()
        for worker_id, code, words in (
            ("", grpc.StatusCode.INVALID_ARGUMENT, "worker_id"),
            ("prefill-9", grpc.StatusCode.NOT_FOUND, "prefill-9"),
            ("prefill-0", grpc.StatusCode.UNAVAILABLE, "prefill-0 is lost"),
        ):
            for call in (drain, undrain):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(channel, worker_id)
                assert caught.value.code() is code
                assert words in (caught.value.details() or "")


@pytest.mark.parametrize("change", [-1, 1], ids=["older worker", "newer worker"])
async def test_a_worker_of_another_release_is_refused_by_name(change: int) -> None:
    async with FakeCluster(prefill=2, decode=1) as cluster:
        other: FakePrefill = cluster.prefill[1]
        other.description = replace(other.description, protocol_version=PROTOCOL_VERSION + change)
        async with routed(cluster) as channel:
            worker = await listed(channel, "prefill-1")
            assert worker.state == admin_pb2.WORKER_STATE_REFUSED
            assert f"speaks version {PROTOCOL_VERSION + change} of the worker protocol" in worker.detail
            assert f"this router speaks {PROTOCOL_VERSION}" in worker.detail
            await generate(channel, 4)
            assert (cluster.prefill[0].served, other.served) == (4, 0)
