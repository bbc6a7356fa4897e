"""TCP: payload goes from the sender's blocks to the kernel and from the kernel into the receiver's blocks.

No copy of ours lies in between. The receiver decides before each read, under the transfer's gate, whether the blocks
may still be written; what comes for a transfer that was revoked meanwhile is read and dropped, and the connection
lives on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import xxhash

from twinstage.errors import ConfigError, TransferError
from twinstage.transfer.frames import MAX_PAYLOAD_BYTES
from twinstage.transfer.gate import WriteGate
from twinstage.transfer.messages import Write
from twinstage.transfer.portion import Portion
from twinstage.transfer.wire import FrameSocket, after

_BACKLOG = 64
_KEEPALIVE_IDLE_S = 15
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3


def listen(host: str, port: int) -> socket.socket:
    """Listen for senders. Raises ConfigError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen for KV on {host}:{port}: {error}; choose another --kv-listen") from error


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """Connect to a receiver at "host:port" or "[host]:port". Raises TransferError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise TransferError(f"{address!r} is not a KV endpoint of the form host:port")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except (OSError, OverflowError) as error:
        raise TransferError(f"cannot reach the KV endpoint {address}: {error}") from error
    tune(connection)
    return connection


def tune(connection: socket.socket) -> None:
    """Send control frames at once, and notice within half a minute when an idle peer's host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


class TcpBlockWriter:
    """Sends bytes with their frame."""

    turn_bytes = MAX_PAYLOAD_BYTES

    def __init__(self, stream: FrameSocket) -> None:
        self._stream = stream

    def write(self, transfer_id: int, portions: Sequence[Portion]) -> None:
        """Send the portions. Raises TransferError."""
        pieces = tuple(portion.piece(checksum=xxhash.xxh3_64_intdigest(portion.source)) for portion in portions)
        self._stream.send(Write(transfer_id, pieces), payload=[portion.source for portion in portions])

    def close(self) -> None:
        """Nothing to give back."""


def receive_payload(stream: FrameSocket, views: Sequence[memoryview], *, gate: WriteGate) -> bool:
    """Read a payload into `views`, in order, as long as `gate` lets it; drop the rest.

    Returns whether all of it went into the views. Raises TransferError when the stream ends or stalls.
    """
    remaining = list(views)
    deadline = time.monotonic() + stream.stall_s
    while remaining:
        with gate.enter() as may_write:
            if not may_write:
                break
            received = stream.receive_available(remaining)
        if received:
            remaining = after(remaining, received)
        else:
            stream.wait_readable(deadline)
    stream.discard(sum(len(view) for view in remaining))
    return not remaining
