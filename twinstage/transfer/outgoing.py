"""One transfer on the sender's side.

    QUEUED -> OFFERED -> OPEN -> COMMITTED -> DONE       any of them may go to DONE

The engine's thread says what to send (`write`, `commit`, `abort`); the writer thread of the connection does it, and is
the only one that changes the phase or reads a source block. It reads none after `finish`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from twinstage.errors import IllegalTransition, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.telemetry.log import get_logger
from twinstage.transfer.frames import MAX_PIECES
from twinstage.transfer.messages import Commit, commit_to_message
from twinstage.transfer.portion import Portion
from twinstage.transfer.values import HandoverCommit, HandoverDone, TransferOutcome
from twinstage.types import KvGrant

logger = get_logger(__name__)


class OutgoingPhase(enum.Enum):
    """Where a transfer stands."""

    QUEUED = "queued"  # the receiver has not heard of it
    OFFERED = "offered"  # it has been asked
    OPEN = "open"  # blocks may be written
    COMMITTED = "committed"  # all were; the receiver verifies
    DONE = "done"


class OutgoingTransfer:
    """The hand-over of one prompt's blocks; made by `KvSender.open`."""

    def __init__(
        self,
        grant: KvGrant,
        on_result: Callable[[TransferOutcome], None],
        *,
        wake: Callable[[OutgoingTransfer], None],
    ) -> None:
        """`wake` brings the transfer to the writer thread's attention."""
        self.grant = grant
        self.phase = OutgoingPhase.QUEUED
        self.kv_bytes = 0  # written so far
        self.lease_deadline_s = time.monotonic() + grant.lease_s
        self.answer_deadline_s: float | None = None  # for the receiver, while it owes an answer
        self._on_result = on_result
        self._wake = wake
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, int]] = deque()  # (source block, position), to be written
        self._commit: Commit | None = None
        self._commit_asked_s = 0.0
        self._aborted = False
        self._finished = False
        self._offset = 0  # bytes of the first pending block that were written

    # --- the engine's side ---------------------------------------------------------------------------

    def write(self, source_block_ids: Sequence[int], position: int) -> None:
        """Queue blocks; the first goes to `grant.block_ids[position]`. Returns at once.

        The source blocks must stay as they are until the result is reported. Raises StaleHandle for positions beyond
        the grant, IllegalTransition after `commit`. Nothing happens when the transfer has ended meanwhile.
        """
        if position < 0 or position + len(source_block_ids) > len(self.grant.block_ids):
            raise StaleHandle(
                f"{len(source_block_ids)} blocks from position {position} on do not fit into the "
                f"{len(self.grant.block_ids)} blocks of the grant"
            )
        with self._lock:
            if self._commit is not None:
                raise IllegalTransition("a transfer's blocks are written before its commit")
            if self._finished or self._aborted:
                return
            self._pending.extend((block_id, position + index) for index, block_id in enumerate(source_block_ids))
        self._wake(self)

    def commit(self, commit: HandoverCommit) -> None:
        """Everything was queued: let the receiver take over once it is written.

        Raises IllegalTransition the second time, TransferError when the channel has no words for `commit`.
        """
        message = commit_to_message(self.transfer_id, commit)
        with self._lock:
            if self._commit is not None:
                raise IllegalTransition("a transfer is committed once")
            self._commit = message
            self._commit_asked_s = time.monotonic()
        self._wake(self)

    def abort(self) -> None:
        """Give the transfer up; idempotent, from any thread. Its result still follows, or comes during this call."""
        with self._lock:
            self._aborted = True
        self._wake(self)

    # --- the writer thread's side --------------------------------------------------------------------

    @property
    def transfer_id(self) -> int:
        return self.grant.transfer_id

    @property
    def is_aborted(self) -> bool:
        with self._lock:
            return self._aborted

    @property
    def deadline_s(self) -> float:
        """When this transfer has taken too long, on the monotonic clock."""
        if self.answer_deadline_s is None:
            return self.lease_deadline_s
        return min(self.lease_deadline_s, self.answer_deadline_s)

    def too_late(self) -> TransferError | None:
        """Why this transfer has taken too long, if it has."""
        now_s = time.monotonic()
        if now_s >= self.lease_deadline_s:
            return StaleHandle("the lease of the grant ran out before the hand-over was complete")
        if now_s >= self.deadline_s:
            return TransferError("the decode worker did not answer in time")
        return None

    def next_portions(self, memory: BlockMemory, max_bytes: int) -> list[Portion]:
        """What is to be written next, at most `max_bytes`; nothing when nothing is pending.

        Small blocks share a frame, large ones are split. Raises StaleHandle when a source block does not exist.
        """
        portions: list[Portion] = []
        room = max_bytes
        while len(portions) < MAX_PIECES and (head := self._head()) is not None:
            source_id, position = head
            rest = memory.block_bytes - self._offset
            if portions and rest > room:
                break
            length = min(rest, room)
            source = memory.block(source_id)[self._offset : self._offset + length]
            portions.append(self._portion(position, source))
            room -= length
            self._advance(length, memory.block_bytes)
        return portions

    def take_commit(self) -> Commit | None:
        """The commit, if it was asked for."""
        with self._lock:
            return self._commit

    def finish(self, outcome: TransferOutcome) -> None:
        """Report the result; nothing of this transfer is read or sent after it."""
        with self._lock:
            self._finished = True
            self._pending.clear()
        self.phase = OutgoingPhase.DONE
        try:
            self._on_result(outcome)
        except Exception:  # the boundary to the owner's code: the other transfers of this connection go on
            logger.exception("reporting a transfer's result failed", transfer_id=self.transfer_id)

    def done(self, transport: str) -> HandoverDone:
        """The outcome of an acknowledged transfer."""
        seconds = time.monotonic() - self._commit_asked_s
        return HandoverDone(transport=transport, kv_bytes=self.kv_bytes, seconds=seconds)

    def _head(self) -> tuple[int, int] | None:
        with self._lock:
            return self._pending[0] if self._pending else None

    def _portion(self, position: int, source: memoryview) -> Portion:
        return Portion(
            position=position,
            block_id=self.grant.block_ids[position],
            offset=self._offset,
            generation=self.grant.generation,
            source=source,
        )

    def _advance(self, length: int, block_bytes: int) -> None:
        self._offset += length
        if self._offset == block_bytes:
            self._offset = 0
            with self._lock:
                self._pending.popleft()
