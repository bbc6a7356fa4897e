"""The books of a receiver: which transfers are expected or running, and which blocks nobody may reuse yet.

    EXPECTED -> OPEN -> VERIFYING -> (gone)        the transfer was committed
        |         |         |
        |         +---------+--> DOOMED -> (gone)  it failed or was revoked; a late write could still land
        +--> (gone)                                it was revoked before a sender came

A transfer is in the books exactly as long as somebody may write to its blocks. "Fenced" means that nobody can any more;
then it leaves the books and the callbacks of those who wait for that are due. The table decides, under one lock, and
does nothing else: callers send, close and call back afterwards, outside the lock.
"""

from __future__ import annotations

import enum
import hmac
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinstage.errors import IntegrityError, StaleHandle, TransferError
from twinstage.telemetry.log import get_logger
from twinstage.transfer.gate import WriteGate
from twinstage.transfer.handshake import grant_proof
from twinstage.transfer.messages import Open, Piece, Transport, Write
from twinstage.transfer.values import KvIdentity
from twinstage.types import KvGrant

logger = get_logger(__name__)

FenceCallback = Callable[[], None]


class Link(Protocol):
    """What the books know of the connection that fills a transfer's blocks."""

    @property
    def transport(self) -> Transport: ...

    def stop_writing(self, transfer_id: int) -> None:
        """Ask the sender to stop; never raises."""


class IncomingPhase(enum.Enum):
    """Where a transfer stands."""

    EXPECTED = "expected"
    OPEN = "open"
    VERIFYING = "verifying"
    DOOMED = "doomed"


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One transfer. `verified`: bytes of each block that have come and are as sent, by position in the grant."""

    grant: KvGrant
    expires_s: float  # reading of the monotonic clock
    verified: dict[int, int] = field(default_factory=dict)
    phase: IncomingPhase = IncomingPhase.EXPECTED
    link: Link | None = None
    gate: WriteGate = field(default_factory=WriteGate)
    fence_callbacks: list[FenceCallback] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A transfer was revoked while its sender may be writing: shut its gate (tcp); ask `link` to stop if `is_first`."""

    link: Link
    gate: WriteGate
    is_first: bool


class IncomingTable:
    """All transfers of one receiver; thread-safe."""

    def __init__(self, identity: KvIdentity, *, num_blocks: int, block_bytes: int) -> None:
        self._identity = identity
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._transfers: dict[int, IncomingTransfer] = {}
        self._blocks: set[int] = set()  # of all transfers in the books

    def expect(self, grant: KvGrant) -> None:
        """Enter a grant. Raises IntegrityError when it is not this worker's to give or its blocks are still in use."""
        identity = self._identity
        if (grant.worker_id, grant.epoch) != (identity.worker_id, identity.epoch):
            raise IntegrityError(f"grant {grant.transfer_id} names worker {grant.worker_id}, epoch {grant.epoch}")
        if grant.layout_fingerprint != identity.layout_fingerprint or not grant.token:
            raise IntegrityError(f"grant {grant.transfer_id} has another layout, or no token")
        blocks = set(grant.block_ids)
        is_some = bool(blocks) or grant.num_cached_blocks > 0  # everything may be there already
        exist = all(0 <= block_id < self._num_blocks for block_id in blocks)
        if not is_some or not exist or len(blocks) != len(grant.block_ids):
            raise IntegrityError(f"grant {grant.transfer_id} has no blocks, equal ones, or ones that do not exist")
        with self._lock:
            if grant.transfer_id in self._transfers:
                raise IntegrityError(f"transfer {grant.transfer_id} is expected already")
            if not blocks.isdisjoint(self._blocks):
                raise IntegrityError(f"blocks {sorted(blocks & self._blocks)} may still be written by another transfer")
            self._blocks |= blocks
            self._transfers[grant.transfer_id] = IncomingTransfer(grant, time.monotonic() + grant.lease_s)

    def open(self, request: Open, *, transcript: bytes, link: Link) -> None:
        """Let `link` fill a grant's blocks. Raises StaleHandle; the transfer itself is then as it was."""
        with self._lock:
            transfer = self._transfers.get(request.transfer_id)
            if transfer is None or transfer.phase is not IncomingPhase.EXPECTED:
                raise StaleHandle(f"transfer {request.transfer_id} is not expected")
            grant = transfer.grant
            if (request.epoch, request.generation) != (grant.epoch, grant.generation):
                raise StaleHandle(f"transfer {request.transfer_id} has another epoch or generation")
            self.check_lease(transfer)
            proof = grant_proof(grant.token, transcript, transfer_id=grant.transfer_id, generation=grant.generation)
            if not hmac.compare_digest(proof, request.proof):
                raise StaleHandle(f"the token of transfer {request.transfer_id} is wrong")
            transfer.phase = IncomingPhase.OPEN
            transfer.link = link

    def check_lease(self, transfer: IncomingTransfer) -> None:
        """Raise StaleHandle when the grant holds no more."""
        if time.monotonic() > transfer.expires_s:
            raise StaleHandle(f"the grant of transfer {transfer.grant.transfer_id} has expired")

    def admit_write(self, write: Write, *, link: Link) -> IncomingTransfer | None:
        """The transfer whose blocks `write` may fill, or None when `link` has no such open transfer.

        Raises TransferError or StaleHandle when the write breaks the rules: the transfer has then to be failed.
        """
        with self._lock:
            transfer = self._open_transfer(write.transfer_id, link)
        if transfer is not None:
            self._fill(transfer, write.pieces)
        return transfer

    def note_verified(self, transfer: IncomingTransfer, write: Write) -> None:
        """The bytes of an admitted write stand in the blocks, as they were sent. For the link's own thread."""
        transfer.verified.update(self._fill(transfer, write.pieces))

    def begin_verifying(self, transfer_id: int, *, link: Link) -> IncomingTransfer | None:
        """The sender committed; None when `link` has no such open transfer."""
        with self._lock:
            transfer = self._open_transfer(transfer_id, link)
            if transfer is not None:
                transfer.phase = IncomingPhase.VERIFYING
            return transfer

    def finish(self, transfer: IncomingTransfer) -> bool:
        """All is verified: close the books on the transfer. False when it was revoked meanwhile."""
        with self._lock:
            if transfer.phase is not IncomingPhase.VERIFYING:
                return False
            self._remove(transfer)
            return True

    def fail(self, transfer_id: int, *, link: Link) -> bool:
        """`link`'s transfer has failed; a late write is still possible. False: it had ended before, if it ever was."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.link is not link or transfer.phase is IncomingPhase.DOOMED:
                return False
            transfer.phase = IncomingPhase.DOOMED
            return True

    def fence(self, transfer_id: int, *, link: Link) -> list[FenceCallback]:
        """No write of `link`'s doomed transfer can land any more; returns the callbacks that are due."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None or transfer.link is not link or transfer.phase is not IncomingPhase.DOOMED:
                return []
            self._remove(transfer)
            return transfer.fence_callbacks

    def revoke(self, transfer_id: int, on_fenced: FenceCallback) -> Revocation | None:
        """Take a grant back. None: it is fenced already; otherwise `on_fenced` is kept, and `fence` returns it."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return None
            phase, transfer.phase = transfer.phase, IncomingPhase.DOOMED
            # Nobody came, or the sender has committed, after which it writes nothing. (That this side may still read
            # the blocks to verify them hurts nobody.)
            if transfer.link is None or phase is IncomingPhase.VERIFYING:
                self._remove(transfer)
                return None
            transfer.fence_callbacks.append(on_fenced)
            return Revocation(link=transfer.link, gate=transfer.gate, is_first=phase is IncomingPhase.OPEN)

    def transfers_of(self, link: Link) -> list[int]:
        """Ids of all transfers that `link` opened and that are still in the books."""
        with self._lock:
            return [key for key, transfer in self._transfers.items() if transfer.link is link]

    def _open_transfer(self, transfer_id: int, link: Link) -> IncomingTransfer | None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.link is not link or transfer.phase is not IncomingPhase.OPEN:
            return None
        return transfer

    def _fill(self, transfer: IncomingTransfer, pieces: Sequence[Piece]) -> dict[int, int]:
        """Check pieces against the grant and what came before, and return the entries of `verified` that change."""
        grant = transfer.grant
        changes: dict[int, int] = {}
        for piece in pieces:
            position, block_id = piece.position, piece.block_id
            if position >= len(grant.block_ids) or block_id != grant.block_ids[position]:
                raise StaleHandle(f"block {block_id} at position {position} is not in the grant")
            if piece.generation != grant.generation:
                raise StaleHandle(f"block {block_id} is written as of generation {piece.generation}")
            before = changes.get(position) or transfer.verified.get(position, 0)
            if piece.offset != before or before + piece.length > self._block_bytes:
                raise TransferError(f"block {block_id} is written out of order, twice, or beyond its end")
            changes[position] = before + piece.length
        return changes

    def _remove(self, transfer: IncomingTransfer) -> None:
        del self._transfers[transfer.grant.transfer_id]
        self._blocks.difference_update(transfer.grant.block_ids)


def call_back(callbacks: list[FenceCallback]) -> None:
    """Tell everyone who waited that a transfer's blocks are safe."""
    for callback in callbacks:
        try:
            callback()
        except Exception:  # the boundary to the owner's code: the next one is told all the same
            logger.exception("a fence callback failed")
