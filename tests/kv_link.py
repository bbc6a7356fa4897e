"""A man in the middle of the KV channel: forwards it frame by frame, over a unix socket or tcp, and holds or spoils it.

Over shared memory the link also keeps the descriptor that the receiver hands to the sender, so that it can change what
the sender wrote, in the receiver's own pool, before the receiver is told of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from twinstage.transfer.frames import HEADER, FrameType, decode_body, decode_header, encode
from twinstage.transfer.messages import Write
from twinstage.types import KvEndpoint, KvGrant

_HANDSHAKE = (FrameType.HELLO, FrameType.PROOF, FrameType.INTRODUCTION)
Spoil = Callable[[Write, Sequence[memoryview]], Write]


def zeroed(write: Write, pieces: Sequence[memoryview]) -> Write:
    """Nothing but zeros arrives; the checksums are those of what was sent."""
    for piece in pieces:
        piece[:] = bytes(len(piece))
    return write


def zeroed_and_approved(write: Write, pieces: Sequence[memoryview]) -> Write:
    """Nothing but zeros arrives, with checksums of zeros: as if nobody checked."""
    zeroed(write, pieces)
    checked = (replace(piece, checksum=xxhash.xxh3_64_intdigest(bytes(piece.length))) for piece in write.pieces)
    return replace(write, pieces=tuple(checked))


@dataclass(eq=False)
class _Connection:
    sender: socket.socket
    receiver: socket.socket
    pool: mmap.mmap | None = None  # the receiver's, over shared memory


class KvLink:
    """Forwards connections for `transport` to a decode worker whose grants it has seen; `through` redirects a grant."""

    def __init__(self, transport: str, *, block_bytes: int) -> None:
        self.transport = transport
        self.delay_s = 0.0  # before every frame of a sender that no handshake needs
        self.spoil: Spoil | None = None
        self.frames = 0  # that were forwarded to the receiver after handshakes
        self._block_bytes = block_bytes
        self._target = ""
        self._passing = threading.Event()
        self._passing.set()
        self._closed = threading.Event()
        self._directory = Path(tempfile.mkdtemp(prefix="link", dir="/tmp"))
        if transport == "shm":
            self.address = str(self._directory / "link.sock")
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self.address)
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def through(self, grant: KvGrant) -> KvGrant:
        """The grant, with this link as its only endpoint."""
        endpoint = next(entry for entry in grant.endpoints if entry.transport == self.transport)
        host, _, port = endpoint.address.rpartition(":")
        self._target = endpoint.address if self.transport == "shm" else f"{host or '127.0.0.1'}:{port}"
        linked = KvEndpoint(transport=self.transport, address=self.address, host_id=endpoint.host_id)
        return replace(grant, endpoints=(linked,))

    def hold(self) -> None:
        """Let nothing of a sender pass, but handshakes."""
        self._passing.clear()

    def run_free(self) -> None:
        """Let everything pass, at once and as it is."""
        self.delay_s, self.spoil = 0.0, None
        self._passing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._passing.set()
        _shut(self._listener)
        for connection in self._connections:
            _shut(connection.sender)
            _shut(connection.receiver)
        for thread in self._threads:
            thread.join(5)
        for connection in self._connections:
            if connection.pool is not None:
                connection.pool.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sender, _ = self._listener.accept()
            except OSError:
                return
            if self.transport == "shm":
                receiver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                receiver.connect(self._target)
            else:
                host, _, port = self._target.rpartition(":")
                receiver = socket.create_connection((host, int(port)), timeout=5)
                receiver.settimeout(None)
            connection = _Connection(sender, receiver)
            self._connections.append(connection)
            self._start(self._to_receiver, connection)
            self._start(self._to_sender, connection)

    def _to_sender(self, connection: _Connection) -> None:
        """Bytes as they come, and the descriptor of the pool with those that it came with."""
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(connection.receiver, 65536, 4)
                if not data:
                    break
                if not descriptors:
                    connection.sender.sendall(data)
                    continue
                socket.send_fds(connection.sender, [data], descriptors)
                connection.pool = mmap.mmap(descriptors[0], 0)
                for descriptor in descriptors:
                    os.close(descriptor)
        _shut(connection.sender)

    def _to_receiver(self, connection: _Connection) -> None:
        """Frame by frame."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = _exactly(connection.sender, HEADER.size)
                header = decode_header(head)
                body = _exactly(connection.sender, header.body_bytes)
                payload = bytearray(_exactly(connection.sender, header.payload_bytes))
                frame = head + body
                if header.kind not in _HANDSHAKE:
                    self._closed.wait(self.delay_s)
                    self._passing.wait()
                    self.frames += 1
                    if header.kind is FrameType.WRITE and self.spoil is not None:
                        write = decode_body(header.kind, body)
                        assert isinstance(write, Write)
                        write = self.spoil(write, self._pieces(write, connection.pool, payload))
                        frame = encode(write, payload_bytes=len(payload))
                connection.receiver.sendall(frame + payload)
        _shut(connection.receiver)

    def _pieces(self, write: Write, pool: mmap.mmap | None, payload: bytearray) -> list[memoryview]:
        """The bytes of every piece where they are now: in the receiver's pool, or in the payload."""
        views, position = [], 0
        for piece in write.pieces:
            start = position if pool is None else piece.block_id * self._block_bytes + piece.offset
            views.append(memoryview(payload if pool is None else pool)[start : start + piece.length])
            position += piece.length
        return views


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()
