"""The sending end of the KV channel, in the worker that computes the prompt.

    transfer = sender.open(grant, on_result)
    transfer.write(blocks, position)     as often as blocks become ready, from the engine's thread
    transfer.commit(...)                 or abort(); on_result follows, once, on a channel thread (or within abort)

There is one connection, with two threads, for each decode worker and way to reach it (routers may see it by different
addresses, and one that leads nowhere must not hold up the others); it is dialled when first needed, kept, and dialled
again after it broke.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from twinstage.errors import InternalError, TransferError
from twinstage.kv import copying
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.dial import Dialler
from twinstage.transfer.handshake import KvSecret, key_source
from twinstage.transfer.outgoing import OutgoingTransfer
from twinstage.transfer.peer import Peer
from twinstage.transfer.tls import KvTlsSource
from twinstage.transfer.values import (
    ChannelTimeouts,
    HandoverCommit,
    HandoverDone,
    HandoverFailed,
    KvIdentity,
    TransferOutcome,
)
from twinstage.types import KvEndpoint, KvGrant, WorkerId

__all__ = [
    "ChannelTimeouts",
    "HandoverCommit",
    "HandoverDone",
    "HandoverFailed",
    "KvIdentity",
    "KvSender",
    "OutgoingTransfer",
    "TransferOutcome",
]


class KvSender:
    """Fills granted blocks of decode workers from the blocks of `memory`."""

    def __init__(
        self,
        memory: BlockMemory,
        identity: KvIdentity,
        *,
        secret: KvSecret,
        transports: Sequence[str] = ("shm", "tcp"),
        timeouts: ChannelTimeouts | None = None,
        tls: KvTlsSource | None = None,
    ) -> None:
        """`secret` must be the receivers'. Raises ConfigError when it is empty.

        With `tls` receivers are reached over TCP only if they have it as well.
        """
        if "shm" in transports:
            copying.prepare()
        self._memory = memory
        self._layout_fingerprint = identity.layout_fingerprint
        self._timeouts = timeouts or ChannelTimeouts()
        self._dialler = Dialler(
            identity=identity,
            keys=key_source(secret),
            block_bytes=memory.block_bytes,
            transports=frozenset(transports),
            timeouts=self._timeouts,
            tls=tls,
        )
        self._lock = threading.Lock()
        self._current: dict[tuple[WorkerId, int, tuple[KvEndpoint, ...]], Peer] = {}  # by worker, epoch, endpoints
        self._peers: list[Peer] = []  # also those that are about to end
        self._closed = False

    def open(self, grant: KvGrant, on_result: Callable[[TransferOutcome], None]) -> OutgoingTransfer:
        """Begin to use a grant. Returns at once; the connection is made meanwhile, and its failure is a result too.

        Raises TransferError when the sender is closed or the process has no threads left, StaleHandle when the grant is
        in use; there is no result then.
        """
        key = (grant.worker_id, grant.epoch, grant.endpoints)
        with self._lock:
            if self._closed:
                raise TransferError("the KV sender is closed")
            peer = self._current.get(key)
            if peer is not None:
                transfer = OutgoingTransfer(grant, on_result, wake=peer.wake)
                if peer.adopt(transfer):
                    return transfer
            peer = self._new_peer(grant)
            transfer = OutgoingTransfer(grant, on_result, wake=peer.wake)
            if not peer.adopt(transfer):
                raise InternalError("a connection that was not started yet takes no transfers")
            try:
                peer.start()
            except RuntimeError as error:  # nobody may find it: a transfer that it took would never end
                raise TransferError(f"no thread could be started for the KV channel: {error}") from error
            self._peers = [other for other in self._peers if other.is_alive] + [peer]
            self._current = {other: known for other, known in self._current.items() if known in self._peers}
            self._current[key] = peer
            return transfer

    def close(self) -> None:
        """End all connections and join their threads; transfers that are running fail. Idempotent."""
        with self._lock:
            self._closed = True
            peers = self._peers
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.join()

    def _new_peer(self, grant: KvGrant) -> Peer:
        return Peer(
            grant.worker_id,
            dial=lambda: self._dialler.dial(grant),
            memory=self._memory,
            layout_fingerprint=self._layout_fingerprint,
            timeouts=self._timeouts,
        )
