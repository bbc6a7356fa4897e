"""Health says NOT_SERVING until told otherwise, and watchers hear of every change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinstage.rpc.health import OVERALL, HealthService
from twinstage.rpc.server import bind, create_server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
GENERATION = "twinstage.v1.GenerationService"


@dataclass(frozen=True, slots=True)
class Served:
    """A health service, and a client of it."""

    health: HealthService
    stub: health_pb2_grpc.HealthStub

    async def check(self, service: str) -> int:
        return (await self.stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status

    def watch(self, service: str) -> grpc.aio.UnaryStreamCall:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=service))


async def next_status(watch: grpc.aio.UnaryStreamCall) -> int:
    return (await asyncio.wait_for(watch.read(), 5)).status


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    server, health = create_server(), HealthService([GENERATION])
    health.attach(server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(health, health_pb2_grpc.HealthStub(channel))
    finally:
        health.end_watches()
        await server.stop(0)


async def test_nothing_serves_at_the_start() -> None:
    async with serving() as served:
        assert await served.check(OVERALL) == NOT_SERVING
        assert await served.check(GENERATION) == NOT_SERVING
        listed = (await served.stub.List(health_pb2.HealthListRequest(), timeout=5)).statuses
    assert {name: item.status for name, item in listed.items()} == {OVERALL: NOT_SERVING, GENERATION: NOT_SERVING}


async def test_services_are_set_one_by_one() -> None:
    async with serving() as served:
        served.health.set(GENERATION, serving=True)
        assert await served.check(GENERATION) == SERVING
        assert await served.check(OVERALL) == NOT_SERVING
        served.health.set(GENERATION, serving=False)
        assert await served.check(GENERATION) == NOT_SERVING


async def test_an_unknown_service_is_not_found() -> None:
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.check("nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_hears_of_every_change_and_of_nothing_else() -> None:
    async with serving() as served:
        watch = served.watch(GENERATION)
        assert await next_status(watch) == NOT_SERVING
        served.health.set(OVERALL, serving=True)
        served.health.set(GENERATION, serving=False)
        served.health.set(GENERATION, serving=True)
        assert await next_status(watch) == SERVING
        served.health.set(GENERATION, serving=False)
        assert await next_status(watch) == NOT_SERVING


async def test_many_watches_hear_of_the_same_change() -> None:
    async with serving() as served:
        watches = [served.watch(OVERALL) for _ in range(50)]
        assert [await next_status(watch) for watch in watches] == [NOT_SERVING] * 50
        served.health.set(OVERALL, serving=True)
        assert [await next_status(watch) for watch in watches] == [SERVING] * 50


async def test_a_watch_of_an_unknown_service_stays_open() -> None:
    async with serving() as served:
        watch = served.watch("later")
        assert await next_status(watch) == SERVICE_UNKNOWN
        assert not watch.done()
        served.health.set("later", serving=True)
        assert await next_status(watch) == SERVING


async def test_a_watch_that_is_cancelled_is_forgotten() -> None:
    async with serving() as served:
        other = served.watch(OVERALL)
        watch = served.watch(OVERALL)
        assert await next_status(other) == await next_status(watch) == NOT_SERVING
        watch.cancel()
        served.health.set(OVERALL, serving=True)
        assert await next_status(other) == SERVING


async def test_shutdown_is_for_good_and_keeps_watches_open() -> None:
    async with serving() as served:
        served.health.set(GENERATION, serving=True)
        watch = served.watch(GENERATION)
        assert await next_status(watch) == SERVING
        served.health.shutdown()
        assert await next_status(watch) == NOT_SERVING
        served.health.set(GENERATION, serving=True)
        served.health.set("new", serving=True)
        assert await served.check(GENERATION) == NOT_SERVING
        assert not watch.done()
        with pytest.raises(grpc.aio.AioRpcError):
            await served.check("new")


async def test_watches_end_before_the_server_stops() -> None:
    async with serving() as served:
        watch = served.watch(OVERALL)
        assert await next_status(watch) == NOT_SERVING
        served.health.end_watches()
        assert await asyncio.wait_for(watch.code(), 5) is grpc.StatusCode.UNAVAILABLE
