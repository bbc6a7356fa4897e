"""Bytes that no client sends: what tests throw at every port, and how they find out which ports there are."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

Attack = Callable[[], Iterator[bytes]]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_STREAM, _END_HEADERS = 1, 4
_LISTEN = "0A"  # in /proc/net/tcp
_CONNECT_S = 5.0


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A literal header field that enters no table (RFC 7541, 6.2.2), of less than 127 bytes each."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_CALL = b"".join(
    _header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/twinstage.v1.GenerationService/GenerateStream"),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
_BEGINNING = _PREFACE + _frame(_SETTINGS, 0, 0)


def nothing() -> Iterator[bytes]:
    """Connect, and say nothing."""
    yield b""


def http1() -> Iterator[bytes]:
    """A browser."""
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def tls() -> Iterator[bytes]:
    """The hello of TLS 1.2, to a port that may not speak it."""
    yield bytes.fromhex("16030100c5010000c10303") + bytes(range(186))


def noise() -> Iterator[bytes]:
    """Random bytes."""
    yield random.Random(1).randbytes(64 * 1024)


def zeros() -> Iterator[bytes]:
    """Lengths, ids and magic numbers of 0."""
    yield bytes(64 * 1024)


def noise_in_http2() -> Iterator[bytes]:
    """A good beginning, then noise."""
    yield _BEGINNING + random.Random(2).randbytes(64 * 1024)


def half_a_frame() -> Iterator[bytes]:
    """A frame that promises 16 MiB."""
    yield _BEGINNING + b"\xff\xff\xff" + struct.pack("!BBI", _DATA, 0, 1) + b"x" * 100


def endless_headers() -> Iterator[bytes]:
    """Headers of 4 MiB in pieces that never end."""
    yield _BEGINNING + _frame(_HEADERS, _END_STREAM, 1, _CALL)
    for number in range(256):
        yield _frame(_CONTINUATION, 0, 1, _header(b"x-%d" % number, b"v" * 100) * 150)


def wrong_compression() -> Iterator[bytes]:
    """Headers that refer to what no table has."""
    yield _BEGINNING + _frame(_HEADERS, _END_HEADERS, 1, b"\xff" * 64)


def rapid_reset() -> Iterator[bytes]:
    """Calls that are taken back at once, 5,000 of them."""
    yield _BEGINNING
    for start in range(1, 10_000, 500):
        yield b"".join(
            _frame(_HEADERS, _END_HEADERS, stream, _CALL) + _frame(_RST_STREAM, 0, stream, struct.pack("!I", 8))
            for stream in range(start, start + 500, 2)
        )


def floods() -> Iterator[bytes]:
    """Questions that want an answer each: 20,000 settings and pings."""
    yield _BEGINNING
    for _ in range(20):
        yield (_frame(_SETTINGS, 0, 0) + _frame(_PING, 0, 0, b"12345678")) * 500


def odd_frames() -> Iterator[bytes]:
    """Frames that are not allowed where they come."""
    yield _BEGINNING + _frame(_CONTINUATION, _END_HEADERS, 7, b"") + _frame(_WINDOW_UPDATE, 0, 0, bytes(4))


def pings(count: int) -> bytes:
    """So many signs of life of an HTTP/2 client."""
    return _frame(_PING, 0, 0, b"12345678") * count


def beginning() -> bytes:
    """The beginning of an HTTP/2 connection."""
    return _BEGINNING


def broken_messages() -> Iterator[bytes]:
    """A call whose message is compressed by nothing known, then one that promises 4 GiB."""
    call = _BEGINNING + _frame(_HEADERS, _END_HEADERS, 1, _CALL)
    yield call + _frame(_DATA, _END_STREAM, 1, b"\x07" + struct.pack("!I", 3) + b"abc")
    yield _frame(_HEADERS, _END_HEADERS, 3, _CALL) + _frame(_DATA, 0, 3, b"\x00\xff\xff\xff\xff" + b"a" * 1000)


ATTACKS: tuple[Attack, ...] = (
    nothing,
    http1,
    tls,
    noise,
    zeros,
    noise_in_http2,
    half_a_frame,
    endless_headers,
    wrong_compression,
    rapid_reset,
    floods,
    odd_frames,
    broken_messages,
)


def begin(connection: socket.socket, attack: Attack) -> None:
    """Send an attack's bytes as far as the peer takes them. It is left to the caller when to close."""
    connection.settimeout(_CONNECT_S)
    with contextlib.suppress(OSError):
        for piece in attack():
            connection.sendall(piece)
            _drain(connection)


def _drain(connection: socket.socket) -> None:
    """Take what the peer has answered, so that it does not stop reading."""
    connection.setblocking(False)
    try:
        while connection.recv(1024 * 1024):
            pass
    except BlockingIOError:
        pass
    finally:
        connection.settimeout(_CONNECT_S)


def connect_tcp(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S)


def connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    connection.connect(path)
    return connection


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process listens, as the kernel has them."""
    return {_port(fields[1]) for fields in _tcp_sockets(pid) if fields[3] == _LISTEN}


def peers(pid: int) -> set[int]:
    """The ports at the other ends of a process's TCP connections."""
    return {_port(fields[2]) for fields in _tcp_sockets(pid) if fields[3] != _LISTEN}


def unix_sockets(pid: int) -> list[str]:
    """The paths of a process's unix sockets: each once for who listens, and once more for each of its connections."""
    inodes = _socket_inodes(pid)
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return [fields[7] for fields in rows if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/")]


def _tcp_sockets(pid: int) -> Iterator[list[str]]:
    """The rows of the kernel's tables that are a process's own: address, peer, state, ..., inode."""
    inodes = _socket_inodes(pid)
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                if (fields := line.split())[9] in inodes:
                    yield fields


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def is_answered(connection: socket.socket) -> bool:
    """Whether a good call, written as the attacks write theirs, gets headers back: so far they are understood."""
    call = _frame(_HEADERS, _END_HEADERS, 1, _CALL) + _frame(_DATA, _END_STREAM, 1, bytes(5))
    connection.sendall(_BEGINNING + call)
    received = b""
    while piece := connection.recv(65536):
        received += piece
        rest = received
        while len(rest) >= 9 and len(rest) >= 9 + int.from_bytes(rest[:3], "big"):
            if rest[3] == _HEADERS and rest[5:9] == b"\0\0\0\1":
                return True
            rest = rest[9 + int.from_bytes(rest[:3], "big") :]
    return False
