"""The sender's side of one connection: a writer thread that does everything, and a reader thread that only listens.

The reader decodes what the receiver says and puts it into the inbox. The writer takes turns: what was said, then one
step of the next transfer that has something to do (an offer, a frame of about 1 MiB, a commit), then those that took
too long. So a revocation is answered between two copies and never during one, transfers share the connection fairly,
and every result is reported by the thread that would read the source blocks.

A peer lives as long as its connection. When that breaks, every transfer fails and the peer retires; the next transfer
to the same worker dials anew.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from twinstage.errors import Cancelled, HandshakeRefused, InternalError, StaleHandle, TransferError, TwinstageError
from twinstage.kv.memory import BlockMemory
from twinstage.telemetry.log import get_logger
from twinstage.transfer.dial import Channel
from twinstage.transfer.handshake import grant_proof
from twinstage.transfer.heartbeat import Heartbeat
from twinstage.transfer.messages import (
    Abort,
    Ack,
    Alive,
    Message,
    Nack,
    Open,
    Opened,
    Revoke,
    Revoked,
)
from twinstage.transfer.outgoing import OutgoingPhase, OutgoingTransfer
from twinstage.transfer.reasons import error_from_reason
from twinstage.transfer.values import ChannelTimeouts, HandoverFailed, TransferOutcome

MAX_UNHEARD = 8192  # words of the receiver that the writer has not come to hear; a transfer gets three at most

logger = get_logger(__name__)


class Peer:
    """One decode worker, as long as one connection to it lives."""

    def __init__(
        self,
        name: str,
        *,
        dial: Callable[[], Channel],
        memory: BlockMemory,
        layout_fingerprint: str,
        timeouts: ChannelTimeouts,
    ) -> None:
        """`dial` connects, on the writer thread."""
        self._name = name
        self._dial = dial
        self._memory = memory
        self._layout_fingerprint = layout_fingerprint
        self._answer_s = timeouts.answer_s
        self._heartbeat = Heartbeat(timeouts.silence_s)
        self._condition = threading.Condition()
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._ready: dict[OutgoingTransfer, None] = {}  # an ordered set: whose turn it is
        self._inbox: deque[Message | TransferError] = deque()
        self._connected = False
        self._closing = False
        self._retired = False
        self._is_worn = False  # it only finishes what it has
        self._writer = threading.Thread(target=self._run, name=f"kv-writer-{name}", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether its threads still run."""
        return self._writer.is_alive()

    def start(self) -> None:
        """Start to dial."""
        self._writer.start()

    def adopt(self, transfer: OutgoingTransfer) -> bool:
        """Take a transfer over. False when the peer has retired. Raises StaleHandle when its id is in use."""
        with self._condition:
            if self._retired or self._closing or self._is_worn:
                return False
            if transfer.transfer_id in self._transfers:
                raise StaleHandle(f"transfer {transfer.transfer_id} is running already; a grant is used once")
            self._transfers[transfer.transfer_id] = transfer
            self._ready[transfer] = None
            self._condition.notify()
            return True

    def wake(self, transfer: OutgoingTransfer) -> None:
        """The transfer has something to do.

        One that is aborted before the connection stands ends here: nobody reads its blocks, and a decode worker that
        does not answer must not keep them.
        """
        with self._condition:
            if self._transfers.get(transfer.transfer_id) is not transfer:
                return
            if self._connected or not transfer.is_aborted:
                self._ready[transfer] = None
                self._condition.notify()
                return
            del self._transfers[transfer.transfer_id]
            self._ready.pop(transfer, None)
        transfer.finish(HandoverFailed(Cancelled("the transfer was aborted")))

    def close(self) -> None:
        """Let the writer thread end: its transfers fail."""
        with self._condition:
            self._closing = True
            self._condition.notify()

    def join(self) -> None:
        """Wait for the threads, unless called on one of them (a result's callback may close the sender)."""
        if threading.current_thread() is not self._writer:
            self._writer.join()

    def _run(self) -> None:
        error: TwinstageError = InternalError("the KV sender failed")
        try:
            channel = self._dial()
            try:
                self._converse(channel)
            finally:
                channel.close()
        except TwinstageError as broken:
            error = broken
        except Exception:  # the outermost boundary of this thread: the owners of its transfers must still be told
            logger.exception("the kv sender failed", peer=self._name)
        self._retire(error)

    def _converse(self, channel: Channel) -> None:
        """Take turns until the connection is over; raises why."""
        reader = threading.Thread(target=self._read, args=(channel,), name=f"kv-reader-{self._name}", daemon=True)
        reader.start()
        try:
            logger.debug("connected to decode worker", peer=self._name, transport=channel.transport)
            with self._condition:
                self._connected = True
            while True:
                self._take_turn(channel)
        finally:
            # Only now, when this thread writes no more, may the receiver see the end of the stream.
            channel.stream.end()
            reader.join()

    def _retire(self, error: TwinstageError) -> None:
        with self._condition:
            self._retired = True
            transfers = list(self._transfers.values())
            self._transfers.clear()
            self._ready.clear()
            expected = self._closing
        if not expected:
            logger.warning(
                "no connection to decode worker", peer=self._name, transfers=len(transfers), error=str(error)
            )
        for transfer in transfers:
            aborted = Cancelled("the transfer was aborted") if transfer.is_aborted else None
            transfer.finish(HandoverFailed(aborted or error))

    def _read(self, channel: Channel) -> None:
        """Put what the receiver says into the inbox, until the connection ends."""
        said: Message | TransferError
        try:
            while (frame := channel.stream.receive()) is not None:
                if self._post(frame.message) > MAX_UNHEARD:
                    raise TransferError(f"decode worker {self._name} says more than it was asked")
            said = TransferError(f"decode worker {self._name} ended the connection")
        except TransferError as error:
            said = error
        except Exception:  # the outermost boundary of this thread: the writer must learn that nobody listens any more
            logger.exception("the kv sender cannot hear", peer=self._name)
            said = TransferError(f"decode worker {self._name} could not be heard")
        self._post(said)

    def _post(self, said: Message | TransferError) -> int:
        """Returns how many words the writer has not heard yet."""
        self._heartbeat.heard()
        if isinstance(said, Alive):
            return 0
        with self._condition:
            self._inbox.append(said)
            self._condition.notify()
            return len(self._inbox)

    def _take_turn(self, channel: Channel) -> None:
        """One turn of the writer; raises TransferError when the connection is over."""
        said, transfer = self._wait()
        for message in said:
            self._hear(message, channel)
        if transfer is not None and transfer.phase is not OutgoingPhase.DONE:
            self._step(transfer, channel)
        for late in self._live():
            if (error := late.too_late()) is not None:
                self._drop(late, error, channel)
        if self._heartbeat.is_due(is_needed=bool(self._live())):
            channel.stream.send(Alive())
        if channel.stream.is_worn:
            with self._condition:
                self._is_worn = True
                self._closing = self._closing or not self._transfers

    def _wait(self) -> tuple[list[Message | TransferError], OutgoingTransfer | None]:
        """Wait for something to do: what was said, whose turn it is, or a deadline."""
        with self._condition:
            while not (self._inbox or self._ready or self._closing):
                deadlines = [transfer.deadline_s for transfer in self._transfers.values()]
                timeout_s = min([*deadlines, self._heartbeat.next_s]) - time.monotonic() if deadlines else None
                if timeout_s is not None and timeout_s <= 0:
                    break
                self._condition.wait(timeout_s)
            if self._closing:
                raise TransferError("this worker closed its end of the KV channel")
            said = list(self._inbox)
            self._inbox.clear()
            transfer = next(iter(self._ready), None)
            if transfer is not None:
                del self._ready[transfer]
            return said, transfer

    def _hear(self, message: Message | TransferError, channel: Channel) -> None:
        if isinstance(message, TransferError):
            raise message
        if not isinstance(message, Opened | Ack | Nack | Revoke):
            raise TransferError(f"a receiver does not send {type(message).__name__} here")
        with self._condition:
            transfer = self._transfers.get(message.transfer_id)
        if transfer is not None:  # else it ended meanwhile: what is late or doubled changes nothing
            self._hear_of(transfer, message, channel)
        if isinstance(message, Revoke):
            channel.stream.send(Revoked(transfer_id=message.transfer_id))

    def _hear_of(self, transfer: OutgoingTransfer, message: Opened | Ack | Nack | Revoke, channel: Channel) -> None:
        match message:
            case Opened():
                if transfer.phase is not OutgoingPhase.OFFERED:
                    raise TransferError("the receiver opened a transfer that was not offered")
                transfer.phase = OutgoingPhase.OPEN
                transfer.answer_deadline_s = None
                self.wake(transfer)
            case Ack():
                if transfer.phase is not OutgoingPhase.COMMITTED:
                    raise TransferError("the receiver acknowledged a transfer that was not committed")
                self._finish(transfer, transfer.done(channel.transport))
            case Nack():
                self._finish(transfer, HandoverFailed(error_from_reason(message.reason, message.message)))
            case Revoke():
                self._finish(transfer, HandoverFailed(StaleHandle("the decode worker took the grant back")))

    def _step(self, transfer: OutgoingTransfer, channel: Channel) -> None:
        """The next thing that a transfer has to do."""
        if transfer.is_aborted:
            self._drop(transfer, Cancelled("the transfer was aborted"), channel)
        elif transfer.phase is OutgoingPhase.QUEUED:
            self._offer(transfer, channel)
        elif transfer.phase is OutgoingPhase.OPEN:
            try:
                self._send_more(transfer, channel)
            except StaleHandle as error:  # a block that does not exist, here or there; the connection is well
                self._drop(transfer, error, channel)

    def _offer(self, transfer: OutgoingTransfer, channel: Channel) -> None:
        grant = transfer.grant
        if grant.layout_fingerprint != self._layout_fingerprint:
            error = HandshakeRefused(
                f"the grant is for KV layout {grant.layout_fingerprint}, not {self._layout_fingerprint}"
            )
            self._finish(transfer, HandoverFailed(error))
            return
        proof = grant_proof(
            grant.token,
            channel.session.transcript,
            transfer_id=grant.transfer_id,
            generation=grant.generation,
        )
        channel.stream.send(
            Open(transfer_id=grant.transfer_id, epoch=grant.epoch, generation=grant.generation, proof=proof)
        )
        transfer.phase = OutgoingPhase.OFFERED
        transfer.answer_deadline_s = time.monotonic() + self._answer_s

    def _send_more(self, transfer: OutgoingTransfer, channel: Channel) -> None:
        commit = transfer.take_commit()  # before looking for blocks: none is queued after it
        portions = transfer.next_portions(self._memory, channel.writer.turn_bytes)
        if portions:
            channel.writer.write(transfer.transfer_id, portions)
            transfer.kv_bytes += sum(len(portion.source) for portion in portions)
            self.wake(transfer)
        elif commit is not None:
            channel.stream.send(commit)
            transfer.phase = OutgoingPhase.COMMITTED
            transfer.answer_deadline_s = time.monotonic() + self._answer_s

    def _drop(self, transfer: OutgoingTransfer, error: TwinstageError, channel: Channel) -> None:
        """End a transfer from this side, and tell the receiver if it knows of it."""
        known = transfer.phase is not OutgoingPhase.QUEUED
        self._finish(transfer, HandoverFailed(error))
        if known:
            channel.stream.send(Abort(transfer_id=transfer.transfer_id))

    def _finish(self, transfer: OutgoingTransfer, outcome: TransferOutcome) -> None:
        with self._condition:
            del self._transfers[transfer.transfer_id]
            self._ready.pop(transfer, None)
        transfer.finish(outcome)

    def _live(self) -> list[OutgoingTransfer]:
        with self._condition:
            return list(self._transfers.values())
