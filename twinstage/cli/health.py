"""Asks health services."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinstage.addresses import DEFAULT_PORT, with_default_port
from twinstage.rpc.access import OPEN_ACCESS, Access

_OPTIONS = (("grpc.enable_http_proxy", 0),)


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
