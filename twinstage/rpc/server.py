"""How every process of ours serves gRPC: the options, the listening address, and the end.

    server = create_server()
    add_...Servicer_to_server(..., server); health.attach(server); add_reflection(server, ...)
    port = bind(server, address)
    await server.start()
    health.set("", serving=True)
    await run_until_signalled(server, health, grace_s=30)

The first SIGTERM or SIGINT drains: health turns NOT_SERVING for good, `on_drain` runs, and running calls may end within
the grace period. The second one ends the process at once, whatever it does then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import grpc

from twinstage.addresses import split_address
from twinstage.errors import ConfigError
from twinstage.rpc.health import HealthService
from twinstage.rpc.interceptors import ErrorInterceptor
from twinstage.rpc.observer import CallObserver
from twinstage.rpc.protocol import MAX_MESSAGE_BYTES
from twinstage.telemetry.log import get_logger
from twinstage.telemetry.process import STOP_SIGNALS, end_at_next_signal, end_now

if TYPE_CHECKING:
    from twinstage.rpc.interceptors import ServerInterceptor

MIN_CLIENT_PING_INTERVAL_S = 10.0
HANDSHAKE_TIMEOUT_S = 10.0  # for TLS and the beginning of HTTP/2; who connects and says nothing is cut off
MAX_METADATA_BYTES = 16 * 1024  # of a call, keys and values, as they stand before they are compressed
UNLIMITED = 0  # what the core's counters take for "no limit"

logger = get_logger(__name__)

DrainCallback = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """When a connection that has been silent is asked for a sign of life, and how long it may take to give one."""

    interval_s: float = 30.0
    timeout_s: float = 10.0

    @classmethod
    def of_lease(cls, lease_s: float) -> Keepalive:
        """For peers that have signs of life of their own, which count sooner."""
        return cls(interval_s=lease_s, timeout_s=lease_s)


def create_server(
    interceptors: Sequence[ServerInterceptor] = (),
    *,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    max_send_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int | None = None,
    max_streams_per_connection: int | None = None,
    max_connection_age_s: float | None = None,
    max_connection_age_grace_s: float = 3600.0,
    keepalive: Keepalive | None = None,
    observer: CallObserver | None = None,
) -> grpc.aio.Server:
    """A server that is not bound yet, with ErrorInterceptor outermost.

    Connections above `max_connections` are closed at once; streams above `max_streams_per_connection` wait at the
    client. None leaves them unlimited, as between routers and workers.

    `max_connection_age_s` makes clients connect anew from time to time, so that load spreads over new replicas; calls
    that still run `max_connection_age_grace_s` later are cut off. None keeps connections for ever, which the sessions
    between routers and workers need. `observer` is told of every call.
    """
    outermost = [] if any(isinstance(item, ErrorInterceptor) for item in interceptors) else [ErrorInterceptor(observer)]
    options = _options(max_receive_bytes, max_send_bytes, keepalive or Keepalive())
    if max_connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    if max_streams_per_connection is not None:
        options.append(("grpc.max_concurrent_streams", max_streams_per_connection))
    if max_connection_age_s is not None:
        options += [
            ("grpc.max_connection_age_ms", _milliseconds(max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(max_connection_age_grace_s)),
        ]
    return grpc.aio.server(interceptors=[*outermost, *interceptors], options=options)


def _options(max_receive_bytes: int, max_send_bytes: int, keepalive: Keepalive) -> list[tuple[str, int]]:
    """Channel arguments of the core. gzip needs none: the core accepts it."""
    return [
        # Without it a second server on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_TIMEOUT_S)),
        # Find clients that went away without a word, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", _milliseconds(keepalive.interval_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(keepalive.timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", UNLIMITED),
        # Clients may do the same, also while they wait for a first token. Faster ones are told too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(MIN_CLIENT_PING_INTERVAL_S)),
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen on `address` ("host:port"; port 0 takes a free one) and return the port; over TLS with `credentials`.

    Raises ConfigError that says why that is not possible and what to do.
    """
    host, port = _split(address)
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:  # the core keeps the reason to itself
        raise ConfigError(f"cannot listen on {address}: {_why_not(host, port)}") from None


def _split(address: str) -> tuple[str, int]:
    try:
        host, port = split_address(address)
    except ValueError:
        host, port = "", 0
    if not host:
        raise ConfigError(f"cannot listen on {address!r}: write it as host:port, as in 0.0.0.0:50051 or [::]:50051")
    return host, port


def _why_not(host: str, port: int) -> str:
    """What the operating system says about listening there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the core does; without it a port whose connections have just ended would count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "the port is in use; stop the program that uses it, or choose another port"
        if error.errno == errno.EACCES:
            return "not permitted; choose a port above 1023"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return "this machine has no such address; choose one of its own, or 0.0.0.0 for all"
        return str(error)
    return "gRPC refused it, although the port is free now; try again"


async def run_until_signalled(
    server: grpc.aio.Server,
    health: HealthService,
    *,
    grace_s: float,
    last_words_s: float = 0.0,
    on_drain: DrainCallback | None = None,
) -> None:
    """Wait for SIGTERM or SIGINT, then end the started `server`; on return every call has ended.

    `on_drain` runs after health said NOT_SERVING and while calls are still served. It, and the calls after it, share
    `grace_s` seconds; calls have `last_words_s` in any case. Then what still runs is cancelled. An exception of
    `on_drain` is raised after the server has stopped. A second signal ends the process with exit code 128 + its number,
    also after this has returned.
    """
    async with _first_signal() as signalled:
        first = await signalled
        logger.info("draining", signal=first.name, grace_s=grace_s)
        deadline_s = time.monotonic() + grace_s
        health.shutdown()
        drain = asyncio.create_task(_drain(on_drain, grace_s))
        await asyncio.wait({drain})
        # Watches have no end of their own, and would use up the grace period.
        health.end_watches()
        await server.stop(max(last_words_s, deadline_s - time.monotonic()))
    logger.info("stopped")
    drain.result()


async def _drain(on_drain: DrainCallback | None, grace_s: float) -> None:
    if on_drain is None:
        return
    try:
        async with asyncio.timeout(grace_s):
            await on_drain()
    except TimeoutError:
        logger.warning("draining took too long", grace_s=grace_s)


@contextlib.asynccontextmanager
async def _first_signal() -> AsyncIterator[asyncio.Future[signal.Signals]]:
    """The first SIGTERM or SIGINT that arrives within the scope; another one, or one after the scope, ends the process.

    The interpreter calls handlers as soon as it runs on the main thread, even if the event loop is held up; that the
    loop has its own as well makes it wake up for them.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[signal.Signals] = loop.create_future()
    seen: list[int] = []

    def act(number: int, frame: FrameType | None) -> None:
        if seen:
            end_now(number, frame)
        seen.append(number)
        loop.call_soon_threadsafe(arrived.set_result, signal.Signals(number))

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, _nothing)
        signal.signal(number, act)
    try:
        yield arrived
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        end_at_next_signal()


def _nothing() -> None:
    """What the event loop does about a signal that was handled."""
