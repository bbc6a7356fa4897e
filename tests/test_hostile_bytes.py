"""Hostile bytes on every port of a real cluster: it goes on serving, and keeps nothing of them."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import hostile
from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.rpc.server import HANDSHAKE_TIMEOUT_S
from twinstage.rpc.worker_process import MAX_CONNECTIONS
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("tiny")

NUM_PREFILL_WORKERS = 2  # of the cluster

Connect = Callable[[], socket.socket]


def _doors(role: RoleProcess) -> Iterator[tuple[str, Connect]]:
    """Every way into a process, by name."""
    for port in sorted(hostile.listening_ports(role.pid)):
        yield f"{role.name}, port {port}", functools.partial(hostile.connect_tcp, port)
    for path in sorted(set(hostile.unix_sockets(role.pid))):
        yield f"{role.name}, {path}", functools.partial(hostile.connect_unix, path)


def _check_serves(cluster: ProcessCluster) -> None:
    """Every process answers, and a request goes through all of them."""
    for role in cluster.processes:
        with grpc.insecure_channel(role.address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, role.name
    _check_serves_through(cluster)


def _check_serves_through(cluster: ProcessCluster) -> None:
    with cluster.channel() as channel:
        request = generation_pb2.GenerateRequest(prompt="Hello", stopping=common_pb2.StoppingOptions(max_tokens=4))
        answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30)
        assert answer.usage.completion_tokens > 0


def test_calls_written_by_hand_are_understood(tiny_cluster: ProcessCluster) -> None:
    """Else the attacks that begin with good calls would be refused before they begin."""
    with hostile.connect_tcp(int(tiny_cluster.address.rpartition(":")[2])) as connection:
        assert hostile.is_answered(connection)


def test_every_port_survives_what_no_client_sends(tiny_cluster: ProcessCluster) -> None:
    _check_serves(tiny_cluster)
    doors = [door for role in tiny_cluster.processes for door in _doors(role)]
    # The router and five workers have a gRPC port each; three of those are decode workers, with two doors for KV each.
    assert len(doors) == 6 + 2 * 3, [name for name, _ in doors]
    attackers: set[int] = set()
    with contextlib.ExitStack() as held:
        for _, connect in doors:
            for attack in hostile.ATTACKS:
                connection = held.enter_context(connect())
                if connection.family != socket.AF_UNIX:
                    attackers.add(connection.getsockname()[1])
                hostile.begin(connection, attack)
        _check_serves(tiny_cluster)  # while all of them still hold their connections
    _check_serves(tiny_cluster)
    tiny_cluster.wait_idle()
    for role in tiny_cluster.processes:
        assert role.process.poll() is None
        what = f"{role.name} has closed their connections"
        wait_until(functools.partial(_is_rid_of, role, attackers), timeout_s=30, what=what)


def test_a_worker_closes_the_connections_that_are_too_many(tiny_cluster: ProcessCluster) -> None:
    """And goes on serving its router, which has one."""
    worker = next(role for role in tiny_cluster.processes if role.ready_event == "worker ready")
    port = int(worker.address.rpartition(":")[2])
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(hostile.connect_tcp(port)) for _ in range(MAX_CONNECTIONS + 8)]
        # The others are closed later: when they have not begun HTTP/2 within HANDSHAKE_TIMEOUT_S.
        wait_until(
            lambda: sum(map(_is_closed, connections)) >= 8, timeout_s=HANDSHAKE_TIMEOUT_S / 2, what="they are closed"
        )
        _check_serves_through(tiny_cluster)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _is_rid_of(role: RoleProcess, attackers: set[int]) -> bool:
    """Whether a process has no connection of theirs; on a unix socket that are more than the prefill workers make."""
    per_path = Counter(hostile.unix_sockets(role.pid)).values()
    return not hostile.peers(role.pid) & attackers and max(per_path, default=0) <= 1 + NUM_PREFILL_WORKERS
