"""How a sender reaches a receiver: the first of the grant's endpoints that both ends can use and that answers."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from twinstage.errors import HandshakeRefused, TwinstageError
from twinstage.transfer import shm, tcp
from twinstage.transfer.handshake import KeySource, SenderSession, greet
from twinstage.transfer.host import host_id
from twinstage.transfer.messages import Transport
from twinstage.transfer.portion import Portion
from twinstage.transfer.shm import ShmBlockWriter
from twinstage.transfer.tcp import TcpBlockWriter
from twinstage.transfer.tls import KvTlsSource, TlsSocket
from twinstage.transfer.values import ChannelTimeouts, KvIdentity
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvEndpoint, KvGrant


class BlockWriter(Protocol):
    """Brings bytes of blocks to the receiver, at most `turn_bytes` of a transfer before another one has its turn."""

    turn_bytes: int

    def write(self, transfer_id: int, portions: Sequence[Portion]) -> None:
        """Bring them, in one frame. Raises StaleHandle for a block that does not exist, else TransferError."""

    def close(self) -> None:
        """Give back what the writer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A connection that is ready for transfers."""

    transport: Transport
    stream: FrameSocket
    session: SenderSession
    writer: BlockWriter

    def close(self) -> None:
        """Close everything; no thread may use the channel any more."""
        self.writer.close()
        self.stream.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialler:
    """What this end brings to every connection."""

    identity: KvIdentity
    keys: KeySource
    block_bytes: int
    transports: Collection[str]
    timeouts: ChannelTimeouts
    tls: KvTlsSource | None = None

    def dial(self, grant: KvGrant) -> Channel:
        """Connect to the worker that gave `grant`. Raises the error of the last endpoint that was tried."""
        refusal: TwinstageError = HandshakeRefused(
            f"decode worker {grant.worker_id} offers {_names(grant.endpoints)} for its KV blocks; "
            f"this worker can use {', '.join(sorted(self._usable)) or 'nothing'}"
        )
        for endpoint in grant.endpoints:
            try:
                if endpoint.transport not in self._usable:
                    continue
                if endpoint.transport != "shm":
                    return self._connect(endpoint, grant, transport="tcp")
                if endpoint.host_id == host_id():
                    return self._connect(endpoint, grant, transport="shm")
            except TwinstageError as error:
                refusal = error  # another endpoint may do: a path may be invisible here, an address unreachable
        raise refusal

    @property
    def _usable(self) -> set[str]:
        """Names of endpoints; with TLS none is dialled that has none."""
        return {"tls" if name == "tcp" and self.tls is not None else name for name in self.transports}

    def _connect(self, endpoint: KvEndpoint, grant: KvGrant, *, transport: Transport) -> Channel:
        stream = FrameSocket(self._connection(endpoint.address, transport), stall_s=self.timeouts.stall_s)
        try:
            with stream.within(self.timeouts.handshake_s):
                stream.secure()
                session = greet(
                    stream,
                    identity=self.identity,
                    key=self.keys()[0],
                    grant=grant,
                    block_bytes=self.block_bytes,
                    transport=transport,
                    timeout_s=self.timeouts.handshake_s,
                )
        except BaseException:
            stream.close()
            raise
        writer = TcpBlockWriter(stream) if session.memory is None else ShmBlockWriter(stream, session.memory)
        return Channel(transport=transport, stream=stream, session=session, writer=writer)

    def _connection(self, address: str, transport: Transport) -> socket.socket | TlsSocket:
        if transport == "shm":
            return shm.connect(address, timeout_s=self.timeouts.connect_s)
        connection = tcp.connect(address, timeout_s=self.timeouts.connect_s)
        if self.tls is None:
            return connection
        return TlsSocket(connection, self.tls, is_receiver=False)


def _names(endpoints: Sequence[KvEndpoint]) -> str:
    return ", ".join(f"{endpoint.transport} at {endpoint.address}" for endpoint in endpoints) or "no way"
