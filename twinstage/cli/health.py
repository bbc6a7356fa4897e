"""Asks health services: once, or on a thread until they serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinstage.addresses import DEFAULT_PORT, with_default_port
from twinstage.rpc.access import OPEN_ACCESS, Access
from twinstage.telemetry.log import get_logger

_OPTIONS = (("grpc.enable_http_proxy", 0),)

logger = get_logger(__name__)


def check(address: str, service: str, *, access: Access = OPEN_ACCESS, timeout_s: float) -> str:
    """The serving status of a service of the server at `address`: SERVING, NOT_SERVING, or why there is no answer."""
    address = with_default_port(address, DEFAULT_PORT)
    with access.open(address, _OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


@contextmanager
def watch_until_serving(address: str, services: Sequence[str], *, on_serving: Callable[[], None]) -> Iterator[None]:
    """Call `on_serving`, on a thread, when every service is SERVING; leaving the scope gives up."""
    channel = grpc.insecure_channel(address, options=_OPTIONS)
    stub = health_pb2_grpc.HealthStub(channel)

    def watch() -> None:
        try:
            for service in services:
                _wait_for_one(stub, service)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed before the call began
            logger.debug("health is not watched any more", address=address, error=str(error))
        else:
            on_serving()

    thread = Thread(target=watch, name="health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        channel.close()
        thread.join(5)


def _wait_for_one(stub: health_pb2_grpc.HealthStub, service: str) -> None:
    request = health_pb2.HealthCheckRequest(service=service)
    for response in stub.Watch(request, wait_for_ready=True):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return
