"""The receiver's side of one connection: one thread that reads frames and answers them.

The thread is the only one that reads from the socket and the only one that moves payload into blocks; `stop_writing`
and `end` may come from any thread.

A write is verified when its frame has come: the bytes as they stand in this worker's own pool against the xxh3 of what
the sender read from its pool. A commit is taken when every byte of every granted block was verified so, and what was
verified is not written again. So the other core verifies while the sender copies on, and a copy that went wrong, is
not complete, or went to another place than it says, fails its transfer.

Over shared memory this guards against faults, not malice: a sender has the pool mapped. Bytes that change after their
frame, by the stray write of a process that also did all that it should have done, go unnoticed, before the commit as
for as long as a request decodes on them. Over tcp nobody but this thread writes.

When a sender breaks the protocol the connection ends, but over shared memory its writes may go on until it has closed
its side. So this side stops sending, which tells the sender to leave, and reads on until the end of the stream; the
blocks stay out of use as long as that takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import xxhash

from twinstage.errors import ChecksumMismatch, InternalError, StaleHandle, TransferError, TwinstageError
from twinstage.kv.memory import BlockMemory
from twinstage.telemetry.log import get_logger
from twinstage.transfer.delegate import TransferDelegate
from twinstage.transfer.handshake import Session
from twinstage.transfer.incoming import IncomingTable, IncomingTransfer, call_back
from twinstage.transfer.messages import (
    Abort,
    Ack,
    Alive,
    Commit,
    Message,
    Nack,
    Open,
    Opened,
    Piece,
    Revoke,
    Revoked,
    Transport,
    Write,
    commit_from_message,
)
from twinstage.transfer.tcp import receive_payload
from twinstage.transfer.values import ReceivedBlocks
from twinstage.transfer.wire import Frame, FrameSocket

logger = get_logger(__name__)

_SEND_S = 1.0  # for an answer; a sender that leaves hundreds of answers unread is stuck, and its connection ends
_REVOKE_S = 0.0  # the owner's thread is not made to wait for a stuck sender at all


class Connection:
    """A connection after its handshake, while it lives; a `Link` for the books."""

    def __init__(
        self,
        stream: FrameSocket,
        *,
        session: Session,
        transport: Transport,
        memory: BlockMemory,
        table: IncomingTable,
        delegate: TransferDelegate,
        count_bytes: Callable[[int], None],
        silence_s: float,
    ) -> None:
        self.transport: Transport = transport
        self._stream = stream
        self._session = session
        self._memory = memory
        self._table = table
        self._delegate = delegate
        self._count_bytes = count_bytes
        self._silence_s = silence_s
        self._send_lock = threading.Lock()  # held for up to _SEND_S
        self._end_lock = threading.Lock()  # held for a moment, so that no socket is shut down after it was closed
        self._to_revoke: deque[int] = deque()  # transfers; who holds _send_lock tells the sender
        self._abandoned = False  # this side ended the connection: its end does not say that the sender stopped

    def serve(self) -> None:
        """Read and answer until the sender ends the connection. Ends every transfer it still has open."""
        error = TransferError(f"prefill worker {self._session.peer_worker_id} ended the connection")
        try:
            while (frame := self._stream.receive(idle_s=self._patience_s)) is not None:
                self._answer(frame)
        except TransferError as broken:
            error = broken
            logger.warning("kv connection broke", peer=self._session.peer_worker_id, error=str(broken))
        finally:
            self._leave(error)
            with self._send_lock, self._end_lock:
                self._stream.close()

    @property
    def _patience_s(self) -> float | None:
        """How long the sender may say nothing: for ever, unless a transfer of it is in the books."""
        return self._silence_s if self._table.transfers_of(self) else None

    def stop_writing(self, transfer_id: int) -> None:
        """Ask the sender to stop, or have who sends to it now do so next. If that fails, the connection ends."""
        self._to_revoke.append(transfer_id)
        self._send_revocations()

    def hang_up(self) -> None:
        """Tell the sender to leave. It confirms by ending the stream, which ends `serve`."""
        with self._end_lock:
            if self.transport == "shm":
                self._stream.end_sending()
            else:
                self._stream.end()

    def abandon(self) -> None:
        """End `serve` without the sender's confirmation; what it might still write stays unfenced for ever."""
        self._abandoned = True
        with self._end_lock:
            self._stream.end()

    def _answer(self, frame: Frame) -> None:
        message = frame.message
        match message:
            case Open():
                self._open(message)
            case Write():
                self._write(message, frame.payload_bytes)
            case Commit():
                self._commit(message)
            case Abort():
                self._fail(message.transfer_id, TransferError("the sender aborted the transfer"))
                self._fence(message.transfer_id)
            case Alive():
                self._send(message)
            case Revoked():
                self._fence(message.transfer_id)
            case _:
                raise TransferError(f"a sender does not send {type(message).__name__}")

    def _open(self, message: Open) -> None:
        try:
            self._table.open(message, transcript=self._session.transcript, link=self)
        except StaleHandle as error:
            self._refuse(message.transfer_id, error)
        else:
            self._tell_opened(message.transfer_id)
            self._send(Opened(transfer_id=message.transfer_id))

    def _tell_opened(self, transfer_id: int) -> None:
        try:
            self._delegate.opened(transfer_id)
        except Exception:  # the boundary to the owner's code: the other transfers of this connection go on
            logger.exception("reporting an opened transfer failed", transfer_id=transfer_id)

    def _write(self, write: Write, payload_bytes: int) -> None:
        if payload_bytes != (write.num_bytes if self.transport == "tcp" else 0):
            raise TransferError(f"a write of {write.num_bytes} bytes came with {payload_bytes} bytes of payload")
        try:
            transfer = self._table.admit_write(write, link=self)
        except TransferError as error:
            self._break_off(write.transfer_id, error)
            transfer = None
        if transfer is None:
            # Refused just now, or a latecomer of one that was refused, revoked or aborted: the sender knows already.
            self._stream.discard(payload_bytes)
        elif self._receive(write, transfer):
            try:
                self._verify(write)
                self._table.note_verified(transfer, write)
            except TransferError as error:
                self._break_off(write.transfer_id, error)

    def _break_off(self, transfer_id: int, error: TransferError) -> None:
        """A write broke the rules, or did not bring what it says: nothing more of the transfer is wanted."""
        self._fail(transfer_id, error)
        self._refuse(transfer_id, error)
        if self.transport == "tcp":
            self._fence(transfer_id)
        else:
            self._send(Revoke(transfer_id=transfer_id))

    def _receive(self, write: Write, transfer: IncomingTransfer) -> bool:
        """Bring the payload into the blocks; False when the transfer was revoked meanwhile."""
        if self.transport == "shm":
            return True
        return receive_payload(self._stream, [self._view(piece) for piece in write.pieces], gate=transfer.gate)

    def _view(self, piece: Piece) -> memoryview:
        return self._memory.block(piece.block_id)[piece.offset : piece.offset + piece.length]

    def _commit(self, message: Commit) -> None:
        transfer_id = message.transfer_id
        transfer = self._table.begin_verifying(transfer_id, link=self)
        if transfer is None:
            self._fence(transfer_id)  # a commit that crossed our revocation: the sender writes nothing after it
            self._refuse(transfer_id, StaleHandle(f"transfer {transfer_id} is not open on this connection"))
            return
        try:
            received = self._received(transfer)
            if not self._table.finish(transfer):
                raise StaleHandle(f"transfer {transfer_id} was revoked")
        except TransferError as error:
            self._fail(transfer_id, error)
            self._fence(transfer_id)
            self._refuse(transfer_id, error)
            return
        self._count_bytes(received.kv_bytes)
        try:
            self._delegate.committed(transfer_id, commit_from_message(message), received)
        except TwinstageError as error:
            self._refuse(transfer_id, error)
        except Exception:  # the boundary to the owner's code: the sender must learn that nobody took the blocks over
            logger.exception("taking over a transfer failed", transfer_id=transfer_id)
            self._refuse(transfer_id, InternalError("the decode worker could not take the blocks over"))
        else:
            self._send(Ack(transfer_id=transfer_id))

    def _verify(self, write: Write) -> None:
        """Check the bytes as they stand in the pool. Raises ChecksumMismatch."""
        for piece in write.pieces:
            view = self._view(piece)
            if xxhash.xxh3_64_intdigest(view) != piece.checksum:
                raise ChecksumMismatch(f"block {piece.block_id} at position {piece.position} is not what was sent")

    def _received(self, transfer: IncomingTransfer) -> ReceivedBlocks:
        """What a commit completes. Raises TransferError when a block is missing, StaleHandle when it is too late."""
        grant = transfer.grant
        self._table.check_lease(transfer)
        for position, block_id in enumerate(grant.block_ids):
            if transfer.verified.get(position) != self._memory.block_bytes:
                raise TransferError(f"the commit came before block {block_id} at position {position} was complete")
        num_blocks = len(grant.block_ids)
        return ReceivedBlocks(
            kv_bytes=num_blocks * self._memory.block_bytes, num_blocks=num_blocks, transport=self.transport
        )

    def _fail(self, transfer_id: int, error: TransferError) -> None:
        """One of this connection's transfers has failed: tell its owner, unless that was what ended it."""
        if not self._table.fail(transfer_id, link=self):
            return
        try:
            self._delegate.failed(transfer_id, error)
        except Exception:  # the boundary to the owner's code: the other transfers of this connection go on
            logger.exception("reporting a failed transfer failed", transfer_id=transfer_id)

    def _fence(self, transfer_id: int) -> None:
        """No write of this transfer can land any more, if it has failed or was revoked."""
        call_back(self._table.fence(transfer_id, link=self))

    def _refuse(self, transfer_id: int, error: TwinstageError) -> None:
        self._send(Nack(transfer_id=transfer_id, reason=error.reason, message=str(error)[:1024]))

    def _leave(self, error: TransferError) -> None:
        """The conversation is over: end what is open, and wait until nothing can be written any more."""
        for transfer_id in self._table.transfers_of(self):
            self._fail(transfer_id, error)
        self.hang_up()
        self._stream.discard_until_end()
        if self._abandoned and self.transport == "shm":
            return
        for transfer_id in self._table.transfers_of(self):
            self._fence(transfer_id)

    def _send(self, message: Message) -> None:
        with self._send_lock:
            self._stream.send(message, timeout_s=_SEND_S)
        self._send_revocations()

    def _send_revocations(self) -> None:
        """Send those that wait, unless somebody sends now: he looks here when he has done so."""
        while self._to_revoke and self._send_lock.acquire(blocking=False):
            try:
                while self._to_revoke:
                    self._stream.send(Revoke(transfer_id=self._to_revoke.popleft()), timeout_s=_REVOKE_S)
            except TransferError as error:
                logger.warning("kv sender cannot be asked to stop", peer=self._session.peer_worker_id, error=str(error))
                self.hang_up()
            finally:
                self._send_lock.release()
