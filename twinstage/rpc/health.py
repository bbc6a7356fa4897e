"""The standard health service (grpc.health.v1), which says NOT_SERVING until it is told otherwise.

The servicer that ships with grpcio starts with SERVING, so that a load balancer would send requests to a worker that
is still loading its model. This one knows its services from the start, and answers

    Check   the status; NOT_FOUND for a service it does not know
    List    every service with its status
    Watch   the status and every change of it, for as long as the client stays; SERVICE_UNKNOWN for an unknown service

All methods belong to the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinstage.errors import NotFound, Unavailable
from twinstage.telemetry.log import get_logger

SERVICE_NAME = "grpc.health.v1.Health"
OVERALL = ""  # the name under which the health of the whole server goes

logger = get_logger(__name__)

if TYPE_CHECKING:  # generic for the type checker only
    Context = grpc.aio.ServicerContext[Any, Any]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Knows for each service, and for the server as a whole, whether it serves."""

    def __init__(self, service_names: Iterable[str] = ()) -> None:
        self._statuses = dict.fromkeys((OVERALL, *service_names), health_pb2.HealthCheckResponse.NOT_SERVING)
        self._shut_down = False
        self._watches_ended = False
        self._watchers: set[asyncio.Event] = set()

    def attach(self, server: grpc.aio.Server) -> None:
        """Serve on `server`, which has not been started."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set(self, service: str, serving: bool) -> None:
        """Change the status of one service ("" for the server as a whole). Ignored after `shutdown`."""
        if self._shut_down:
            logger.debug("health stays NOT_SERVING after shutdown", service=service)
            return
        response = health_pb2.HealthCheckResponse
        self._statuses[service] = response.SERVING if serving else response.NOT_SERVING
        self._wake_watchers()

    def shutdown(self) -> None:
        """Say NOT_SERVING for every service, for good; watches go on."""
        self._shut_down = True
        self._statuses = dict.fromkeys(self._statuses, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._wake_watchers()

    def end_watches(self) -> None:
        """End all watches, present and future, with UNAVAILABLE: the server is about to stop."""
        self._watches_ended = True
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def Check(  # noqa: N802 - the name is the proto's
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(
                f"no service {request.service!r} here; List names all",
                resource_type="service",
                resource_name=request.service,
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        statuses = self._statuses.items()
        return health_pb2.HealthListResponse(
            statuses={service: health_pb2.HealthCheckResponse(status=status) for service, status in statuses}
        )

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            sent = None
            while True:
                status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    yield health_pb2.HealthCheckResponse(status=status)
                    sent = status
                    continue  # it may have changed while it was being sent
                if self._watches_ended:
                    raise Unavailable("the server is shutting down")
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
