"""The hand-over of one prompt's KV blocks: what a step completed, as the engine thread reports it, and the end.

    advance, advance, ... commit     the prompt was computed and the generation goes on elsewhere
    advance, advance, ... abort      it was cancelled, it failed, or its first token was also its last

Every block that the grant names is written once, as soon as all its tokens are computed; the last one, which may be
partly filled, when the prompt is complete. The decode worker has the blocks before those already.

The sender reads the blocks from where they are: they may be released only after it has reported
the transfer's result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from twinstage.engine.core import ComputedChunk
from twinstage.errors import TransferError, TwinstageError
from twinstage.transfer.sender import OutgoingTransfer
from twinstage.transfer.values import HandoverCommit
from twinstage.types import RequestId


class Handoff:
    """Writes the blocks of one prompt as they are completed. One call at a time; `abort` may come any time."""

    def __init__(self, transfer: OutgoingTransfer, *, block_size: int, num_cached_blocks: int = 0) -> None:
        """`num_cached_blocks` come before the first block of the grant; they are not written."""
        self._transfer = transfer
        self._block_size = block_size
        self._first = num_cached_blocks
        self._written: tuple[int, ...] = ()  # ids of source blocks, by position in the grant
        self._lock = threading.Lock()
        self._closed = False  # committed or aborted
        self._refusal: TwinstageError | None = None

    @property
    def refusal(self) -> TwinstageError | None:
        """Why this side gave the hand-over up; None when it did not."""
        return self._refusal

    def advance(self, computed: ComputedChunk) -> None:
        """Write the blocks that `computed` completed."""
        with self._lock:
            if self._closed:
                return
            next_block = self._first + len(self._written)
            if computed.block_ids[self._first : next_block] != self._written:
                self._give_up(
                    TransferError("the prompt was computed again in other blocks while it was being handed over")
                )
                return
            complete = computed.num_computed_tokens // self._block_size
            if computed.num_computed_tokens >= computed.total_tokens:
                complete = -(-computed.total_tokens // self._block_size)
            fresh = computed.block_ids[next_block:complete]
            if fresh:
                self._written += fresh
                self._unless_refused(lambda: self._transfer.write(fresh, len(self._written) - len(fresh)))

    def commit(self, commit: HandoverCommit) -> None:
        """Everything is written: let the decode worker check it and go on with the first token."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._unless_refused(lambda: self._transfer.commit(commit))

    def complete(self, computed: ComputedChunk, first_tokens: tuple[tuple[int, int], ...]) -> None:
        """The prompt is computed, and the generation goes on elsewhere with `first_tokens`: hand over what is left."""
        self.advance(computed)
        request_id = RequestId(computed.request_id.rpartition("#")[0])  # by which router and decode worker know it
        self.commit(HandoverCommit(request_id=request_id, num_tokens=computed.total_tokens, first_tokens=first_tokens))

    def abort(self) -> None:
        """Give the hand-over up; idempotent. The transfer's result still follows."""
        with self._lock:
            self._closed = True
        self._transfer.abort()

    def _unless_refused(self, act: Callable[[], None]) -> None:
        """What the channel refuses to do ends this hand-over, and must not disturb those of the same step."""
        try:
            act()
        except TwinstageError as error:
            self._give_up(error)

    def _give_up(self, error: TwinstageError) -> None:
        self._closed = True
        self._refusal = error
        self._transfer.abort()
