"""A socket that carries frames, with a deadline on every wait that has begun.

The socket is non-blocking throughout: waits are polls, which touch no block. Whoever reads payload into blocks
therefore decides anew before every read whether the blocks may still be written.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twinstage.errors import HandshakeRefused, TransferError
from twinstage.transfer import tls
from twinstage.transfer.frames import HEADER, Header, decode_body, decode_header, encode
from twinstage.transfer.messages import Message
from twinstage.transfer.tls import TlsSocket

_MAX_BUFFERS = 1024  # IOV_MAX: the most buffers the kernel takes in one call
_DISCARD_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose payload, `payload_bytes` long, has not been read yet."""

    message: Message
    payload_bytes: int


class FrameSocket:
    """Frames over a stream socket. One thread may read while another sends; each direction has one user at a time."""

    def __init__(self, connection: socket.socket | TlsSocket, *, stall_s: float) -> None:
        """Take `connection` over. A frame that has begun must be complete within `stall_s` seconds."""
        connection.setblocking(False)
        self.connection = connection
        self.stall_s = stall_s
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)
        self._until_s: float | None = None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """A scope in which no wait goes beyond `seconds` from now, however often the peer sends a little."""
        self._until_s = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until_s = None

    def secure(self) -> None:
        """Agree on TLS, where the connection has it; before the first frame.

        Raises HandshakeRefused, and TransferError when the peer is gone or takes longer than the stall time.
        """
        if isinstance(self.connection, TlsSocket):
            deadline = self._deadline(self.stall_s)
            try:
                while (event := self.connection.agree()) is not None:
                    _wait(self._readable if event == select.POLLIN else self._writable, deadline)
            except HandshakeRefused:
                self._let_peer_read_why(self.connection, deadline)
                raise

    @property
    def binding(self) -> bytes:
        """What proofs on this connection must include, so that they hold on no other; nothing without TLS."""
        return self.connection.receiver_sha256 if isinstance(self.connection, TlsSocket) else b""

    @property
    def is_worn(self) -> bool:
        """Whether nothing new should be sent here: the keys of TLS have served long enough."""
        return isinstance(self.connection, TlsSocket) and self.connection.bytes_sent >= tls.MAX_BYTES_PER_CONNECTION

    def send(self, message: Message, *, payload: Sequence[memoryview] = (), timeout_s: float | None = None) -> None:
        """Send one frame. Raises TransferError when the peer is gone or takes nothing for the stall time."""
        header = encode(message, payload_bytes=sum(len(view) for view in payload))
        deadline = self._deadline(self.stall_s if timeout_s is None else timeout_s)
        self._send_all([memoryview(header), *payload], deadline=deadline)

    def receive(self, *, idle_s: float | None = None) -> Frame | None:
        """The next frame, or None when the peer ended the stream between two frames.

        Waits `idle_s` seconds for its first byte (None: for ever). Raises TransferError when it is malformed, cut
        short or late.
        """
        header = self.receive_header(idle_s=idle_s)
        return None if header is None else self.receive_message(header)

    def receive_header(self, *, idle_s: float | None = None) -> Header | None:
        """The next frame's header; see `receive`."""
        data = bytearray(HEADER.size)
        view = memoryview(data)
        received = self._receive_some(view, self._deadline(idle_s))
        if received == 0:
            return None
        self._receive_exactly(view[received:], self._deadline(self.stall_s))
        return decode_header(data)

    def receive_message(self, header: Header) -> Frame:
        """The rest of a frame whose header has been read."""
        body = bytearray(header.body_bytes)
        self._receive_exactly(memoryview(body), self._deadline(self.stall_s))
        return Frame(decode_body(header.kind, body), header.payload_bytes)

    def receive_available(self, views: Sequence[memoryview]) -> int:
        """Read into `views` what has arrived, without waiting; 0 when nothing has. Raises TransferError at the end."""
        try:
            received = self.connection.recvmsg_into(views[:_MAX_BUFFERS])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransferError(f"the connection broke: {error}") from error
        if received == 0:
            raise TransferError("the peer ended the stream in the middle of a frame")
        return received

    def wait_readable(self, deadline: float | None) -> None:
        """Wait until something can be read. Raises TransferError at the deadline (a reading of time.monotonic)."""
        _wait(self._readable, deadline)

    def discard(self, num_bytes: int) -> None:
        """Read `num_bytes` bytes of payload that nobody wants."""
        scratch = memoryview(bytearray(min(num_bytes, _DISCARD_BYTES)))
        deadline = self._deadline(self.stall_s)
        while num_bytes:
            received = self._receive_some(scratch[: min(num_bytes, len(scratch))], deadline)
            if received == 0:
                raise TransferError("the peer ended the stream in the middle of a frame")
            num_bytes -= received

    def discard_until_end(self) -> None:
        """Read and drop everything until the peer ends the stream or `end` is called; has no deadline of its own."""
        scratch = memoryview(bytearray(_DISCARD_BYTES))
        with contextlib.suppress(TransferError):
            while self._receive_some(scratch, None):
                pass

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes; reading goes on."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """End both directions and wake whoever waits on this socket."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; no thread may use it any more."""
        self.connection.close()

    def _let_peer_read_why(self, connection: TlsSocket, deadline: float | None) -> None:
        """Wait for the peer's end: to close with something unread would cut off what was sent last."""
        self.end_sending()
        with contextlib.suppress(TransferError):
            while not connection.drop_unread():
                _wait(self._readable, deadline)

    def _deadline(self, seconds: float | None) -> float | None:
        if seconds is None:
            return self._until_s
        deadline_s = time.monotonic() + seconds
        return deadline_s if self._until_s is None else min(deadline_s, self._until_s)

    def _send_all(self, buffers: list[memoryview], *, deadline: float | None) -> None:
        while buffers:
            try:
                sent = self.connection.sendmsg(buffers[:_MAX_BUFFERS])
            except BlockingIOError:
                _wait(self._writable, deadline)
                continue
            except OSError as error:
                raise TransferError(f"the connection broke: {error}") from error
            buffers = after(buffers, sent)

    def _receive_some(self, view: memoryview, deadline: float | None) -> int:
        while True:
            try:
                return self.connection.recv_into(view)
            except BlockingIOError:
                _wait(self._readable, deadline)
            except OSError as error:
                raise TransferError(f"the connection broke: {error}") from error

    def _receive_exactly(self, view: memoryview, deadline: float | None) -> None:
        while view:
            received = self._receive_some(view, deadline)
            if received == 0:
                raise TransferError("the peer ended the stream in the middle of a frame")
            view = view[received:]


def after(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views`, taken as one run of bytes, after its first `num_bytes`."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    rest = list(views[index:])
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest


def _wait(poller: select.poll, deadline: float | None) -> None:
    if deadline is None:
        poller.poll()
        return
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poller.poll(remaining_s * 1000):
        raise TransferError("the peer did not answer in time")
