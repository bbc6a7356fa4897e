"""The receiving end of the KV channel, in the worker that owns the blocks.

    expect(grant)                 a sender that shows the grant's token may fill the grant's blocks, all of them, once
      -> delegate.opened          it did
      -> delegate.committed       they are filled and verified; nobody writes to them any more
      -> delegate.failed          they will not be; revoke says when they may be reused
    revoke(transfer, on_fenced)   take the grant back in whatever state it is

Threads: one that accepts for each endpoint, and one for each connection, which also runs the delegate. `close` joins
them all.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from pathlib import Path

from twinstage.errors import InternalError, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.telemetry.log import get_logger
from twinstage.transfer import tcp
from twinstage.transfer.callers import MAX_CONNECTIONS, Callers
from twinstage.transfer.connection import Connection
from twinstage.transfer.delegate import TransferDelegate
from twinstage.transfer.handshake import KvSecret, key_source, welcome
from twinstage.transfer.host import host_id
from twinstage.transfer.incoming import FenceCallback, IncomingTable, call_back
from twinstage.transfer.messages import Transport
from twinstage.transfer.shm import PrivateSocket
from twinstage.transfer.tls import KvTlsSource, TlsSocket
from twinstage.transfer.values import ChannelTimeouts, HandoverCommit, KvIdentity, ReceivedBlocks
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvEndpoint, KvGrant

__all__ = [
    "ChannelTimeouts",
    "HandoverCommit",
    "KvIdentity",
    "KvReceiver",
    "ReceivedBlocks",
    "TransferDelegate",
]

logger = get_logger(__name__)

_ACCEPT_AGAIN_S = 1.0  # pause when accepting fails, as it does while the process has no descriptors left


class KvReceiver:
    """Lets senders fill granted blocks of `memory`, over shared memory and over TCP."""

    def __init__(
        self,
        memory: BlockMemory,
        identity: KvIdentity,
        *,
        secret: KvSecret,
        delegate: TransferDelegate,
        shm_directory: Path | None,
        tcp_listen: tuple[str, int] | None,
        tcp_advertise: str | None = None,
        timeouts: ChannelTimeouts | None = None,
        tls: KvTlsSource | None = None,
    ) -> None:
        """Nothing listens before `start`. With `tls` senders come over TCP only with it.

        `shm_directory`: where to put the unix socket; None: no shared memory. `tcp_listen`: address, port 0 for a free
        one; None: no TCP. `tcp_advertise`: host or host:port that senders reach it by, if it differs; listening on all
        addresses without it advertises no host, and the router fills in the one by which it reaches this worker.
        """
        self._memory = memory
        self._identity = identity
        self._keys = key_source(secret)
        self._delegate = delegate
        self._shm_directory = shm_directory
        self._tcp_listen = tcp_listen
        self._tcp_advertise = tcp_advertise
        self._timeouts = timeouts or ChannelTimeouts()
        self._tls = tls
        self._table = IncomingTable(identity, num_blocks=memory.num_blocks, block_bytes=memory.block_bytes)
        self._lock = threading.Lock()
        self._bytes_received = 0
        self._endpoints: tuple[KvEndpoint, ...] | None = None
        self._private_socket: PrivateSocket | None = None
        self._listeners: list[tuple[Transport, socket.socket]] = []
        self._acceptors: list[threading.Thread] = []
        self._callers = Callers()
        self._closing = False
        self._wake_fd = -1

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Ways to reach the blocks, best first; known once started."""
        if self._endpoints is None:
            raise InternalError("the KV receiver has not been started")
        return self._endpoints

    @property
    def bytes_received(self) -> int:
        """Bytes of blocks that arrived and were verified, since the start."""
        with self._lock:
            return self._bytes_received

    def start(self) -> None:
        """Listen. Raises ConfigError when an address or directory cannot be had; nothing is left open then."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        endpoints: list[KvEndpoint] = []
        try:
            if self._shm_directory is not None:
                self._private_socket = PrivateSocket(self._shm_directory)
                self._listeners.append(("shm", self._private_socket.listener))
                endpoints.append(self._endpoint("shm", str(self._private_socket.path)))
            if self._tcp_listen is not None:
                listener = tcp.listen(*self._tcp_listen)
                self._listeners.append(("tcp", listener))
                name = "tcp" if self._tls is None else "tls"
                endpoints.append(self._endpoint(name, _advertised(listener, self._tcp_advertise)))
        except BaseException:
            self.close()
            raise
        self._endpoints = tuple(endpoints)
        for transport, listener in self._listeners:
            thread = threading.Thread(
                target=self._accept, args=(listener, transport), name=f"kv-accept-{transport}", daemon=True
            )
            self._acceptors.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop listening, end all connections, join all threads, remove the socket. Idempotent; not for the delegate.

        Senders are asked to leave and given the shutdown time to confirm it; transfers of a sender that does not stay
        unfenced.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
        for thread in self._acceptors:
            thread.join()
        for _, listener in self._listeners:
            listener.close()
        if self._private_socket is not None:
            self._private_socket.close()
        self._callers.end_all(shutdown_s=self._timeouts.shutdown_s)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    def expect(self, grant: KvGrant) -> None:
        """Let a sender fill the blocks of `grant`.

        Raises IntegrityError when the grant is not this worker's or one of its blocks may still be written by another
        transfer: bugs of the owner.
        """
        self._table.expect(grant)

    def revoke(self, transfer_id: int, on_fenced: FenceCallback) -> None:
        """Take a grant back; idempotent, from any thread, and right for transfers that ended long ago.

        `on_fenced` runs once, here or on a channel thread, when no late write can land: at once over TCP, and over
        shared memory when the sender has confirmed or its process is gone. A sender that is stopped, but alive, keeps
        the blocks out of use.
        """
        revocation = self._table.revoke(transfer_id, on_fenced)
        if revocation is None:
            on_fenced()
            return
        if revocation.link.transport == "tcp":
            revocation.gate.shut()
            call_back(self._table.fence(transfer_id, link=revocation.link))
        if revocation.is_first:
            revocation.link.stop_writing(transfer_id)

    def _endpoint(self, transport: str, address: str) -> KvEndpoint:
        return KvEndpoint(transport=transport, address=address, host_id=host_id())

    def _accept(self, listener: socket.socket, transport: Transport) -> None:
        """Accept senders until the receiver closes."""
        closing = select.poll()
        closing.register(self._wake_fd, select.POLLIN)
        waiting = select.poll()
        waiting.register(self._wake_fd, select.POLLIN)
        waiting.register(listener, select.POLLIN)
        listener.setblocking(False)
        while True:
            waiting.poll()
            if self._closing:
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue  # the sender changed its mind
            except OSError as error:
                logger.warning("a kv sender could not be accepted", transport=transport, error=str(error))
                closing.poll(_ACCEPT_AGAIN_S * 1000)
                continue
            self._admit(connection, transport)

    def _admit(self, connection: socket.socket, transport: Transport) -> None:
        """Give a connection its thread, unless there are too many."""
        tls = self._tls if transport == "tcp" else None
        carrier = connection if tls is None else TlsSocket(connection, tls, is_receiver=True)
        stream = FrameSocket(carrier, stall_s=self._timeouts.stall_s)
        thread = threading.Thread(
            target=self._serve, args=(stream, transport), name=f"kv-receiver-{transport}", daemon=True
        )
        if not self._callers.arrive(thread, stream, transport):
            logger.warning("a kv sender was turned away: too many connections", limit=MAX_CONNECTIONS)
            stream.close()
            return
        try:
            if transport == "tcp":
                tcp.tune(connection)
            thread.start()
        except (OSError, RuntimeError) as error:  # it broke already, or there are no threads left: accept the others
            logger.warning("a kv sender could not be served", transport=transport, error=str(error))
            self._callers.leave(thread)
            stream.close()

    def _serve(self, stream: FrameSocket, transport: Transport) -> None:
        """The life of one connection."""
        try:
            with stream.within(self._timeouts.handshake_s):
                stream.secure()
                session = welcome(
                    stream,
                    identity=self._identity,
                    keys=self._keys(),
                    memory=self._memory,
                    transport=transport,
                    timeout_s=self._timeouts.handshake_s,
                )
            connection = Connection(
                stream,
                session=session,
                transport=transport,
                memory=self._memory,
                table=self._table,
                delegate=self._delegate,
                count_bytes=self._count_bytes,
                silence_s=self._timeouts.silence_s,
            )
            if not self._callers.establish(threading.current_thread(), connection):
                return
            logger.debug("kv sender connected", peer=session.peer_worker_id, transport=transport)
            connection.serve()
        except TransferError as error:
            logger.warning("a kv sender was refused", transport=transport, reason=error.reason, error=str(error))
        except Exception:  # the outermost boundary of this thread: the receiver and its other connections go on
            logger.exception("a kv connection failed", transport=transport)
        finally:
            self._callers.leave(threading.current_thread())
            stream.close()

    def _count_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_received += num_bytes


def _advertised(listener: socket.socket, advertise: str | None) -> str:
    """The address that senders are given: host:port, or :port when only the router knows the host."""
    host, port = listener.getsockname()[:2]
    if advertise:
        name, separator, given_port = advertise.rpartition(":")
        has_port = bool(separator) and given_port.isdigit() and not name.endswith(":")
        return advertise if has_port and int(given_port) else f"{name if has_port else advertise}:{port}"
    if host in ("0.0.0.0", "::"):
        return f":{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
