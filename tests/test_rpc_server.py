"""Servers of ours: one port each, the options that clients rely on, and an end that takes no longer than it may."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hostile import beginning, pings
from rpc_service import SERVICE, serving
from twinstage.errors import ConfigError
from twinstage.rpc.health import HealthService
from twinstage.rpc.server import bind, create_server, run_until_signalled
from twinstage.v1.generation_pb2 import GenerateRequest


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """After a server has ended, a signal ends its process; this one goes on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_port_zero_takes_a_free_port() -> None:
    server = create_server()
    assert 0 < bind(server, "127.0.0.1:0") < 65536
    await server.stop(None)


async def test_a_port_in_use_is_an_error_that_says_so() -> None:
    first, second = create_server(), create_server()
    port = bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: the port is in use; stop the program"):
        bind(second, f"127.0.0.1:{port}")
    await first.stop(None)


async def test_a_port_that_another_program_uses_is_an_error_on_all_addresses_too() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        bind(create_server(), f"0.0.0.0:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    "address", ["", "50051", "localhost", ":50051", "localhost:", "localhost:x", "localhost:65536"]
)
async def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        bind(create_server(), address)


async def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no such address"):
        bind(create_server(), "192.0.2.1:50051")


@pytest.mark.parametrize("size", [99_000, 101_000])
async def test_messages_are_limited_both_ways(size: int) -> None:
    async def behaviour(request: GenerateRequest, context: Any) -> StringValue:
        return StringValue(value="x" * (request.priority or 1))

    async with serving(unary_unary=behaviour, max_bytes=100_000) as service:
        for request in (GenerateRequest(prompt="x" * size), GenerateRequest(priority=size)):
            if size < 100_000:
                await service.call("unary_unary", request)
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.call("unary_unary", request)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_compressed_requests_are_accepted() -> None:
    async def behaviour(request: GenerateRequest, context: Any) -> StringValue:
        return StringValue(value=request.prompt)

    async with serving(unary_unary=behaviour) as service:
        request = GenerateRequest(prompt="x" * 10_000)
        assert await service.call("unary_unary", request, compression=grpc.Compression.Gzip) == [request.prompt]


async def test_old_connections_are_replaced_without_failing_calls() -> None:
    server = create_server(max_connection_age_s=0.2, max_connection_age_grace_s=5.0)
    peers: set[str] = set()

    async def behaviour(request: bytes, context: Any) -> bytes:
        peers.add(context.peer())
        return b""

    handlers = {"unary_unary": grpc.unary_unary_rpc_method_handler(behaviour)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        deadline_s = time.monotonic() + 10
        while len(peers) < 2 and time.monotonic() < deadline_s:
            await channel.unary_unary(f"/{SERVICE}/unary_unary")(b"", timeout=5)
    await server.stop(None)
    assert len(peers) >= 2


# --- the end --------------------------------------------------------------------------------------


class Running:
    """A server under `run_until_signalled`, with a call that ends when the test says so."""

    def __init__(self) -> None:
        self.server = create_server()
        self.health = HealthService()
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()
        self.cancelled = False

    async def behaviour(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return b"done"

    @contextlib.asynccontextmanager
    async def scope(
        self, *, grace_s: float, on_drain: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.UnaryUnaryCall, grpc.aio.Channel]]:
        """Yields the run as a task, a running call and its channel."""
        handlers = {"unary_unary": grpc.unary_unary_rpc_method_handler(self.behaviour)}
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        self.health.attach(self.server)
        port = bind(self.server, "127.0.0.1:0")
        await self.server.start()
        self.health.set("", serving=True)
        run = asyncio.create_task(run_until_signalled(self.server, self.health, grace_s=grace_s, on_drain=on_drain))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/unary_unary")(b"", timeout=30)
            await asyncio.wait_for(self.started.wait(), 5)
            yield run, call, channel


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_lets_calls_end(number: signal.Signals) -> None:
    running, drained = Running(), asyncio.Event()

    async def on_drain() -> None:
        drained.set()

    async with running.scope(grace_s=20, on_drain=on_drain) as (run, call, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(os.getpid(), number)
        assert (await asyncio.wait_for(watch.read(), 5)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await asyncio.wait_for(drained.wait(), 5)
        assert not run.done()
        running.may_end.set()
        assert await call == b"done"
        await asyncio.wait_for(run, 5)
    assert not running.cancelled


async def test_draining_happens_while_calls_are_still_served() -> None:
    running, answers = Running(), []

    async def on_drain() -> None:
        running.may_end.set()
        answers.append(await call_again())

    async with running.scope(grace_s=20, on_drain=on_drain) as (run, call, channel):

        async def call_again() -> bytes:
            return await channel.unary_unary(f"/{SERVICE}/unary_unary")(b"", timeout=5)

        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(run, 5)
        assert await call == b"done"
    assert answers == [b"done"]


async def test_the_grace_period_is_an_end_to_everything() -> None:
    running = Running()

    async def on_drain() -> None:
        await asyncio.sleep(60)

    async with running.scope(grace_s=0.2, on_drain=on_drain) as (run, call, _):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(run, 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert running.cancelled


async def test_a_drain_that_fails_still_stops_the_server() -> None:
    running = Running()

    async def on_drain() -> None:
        raise ValueError("a bug")

    async with running.scope(grace_s=20, on_drain=on_drain) as (run, call, channel):
        running.may_end.set()
        await call
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ValueError, match="a bug"):
            await asyncio.wait_for(run, 5)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE}/unary_unary")(b"", timeout=5)


async def test_clients_may_ask_for_signs_of_life_but_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the server's setting, gRPC allows a ping in five minutes, and clients that watch a stream are cut off."""
    monkeypatch.setattr("twinstage.rpc.server.MIN_CLIENT_PING_INTERVAL_S", 0.1)
    server = create_server()
    port = bind(server, "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(beginning())
        for _ in range(5):
            writer.write(pings(1))
            await asyncio.sleep(0.15)
        assert not reader.at_eof()
        received = await reader.read(65536)
        assert b"too_many_pings" not in received
        writer.write(pings(10))
        async with asyncio.timeout(10):
            while b"too_many_pings" not in received:
                more = await reader.read(65536)
                assert more, "hung up without a word"
                received += more
    finally:
        writer.close()
        await server.stop(None)
