"""What a KV receiver asks of the owner of the blocks."""

from __future__ import annotations

from typing import Protocol

from twinstage.errors import TransferError
from twinstage.transfer.values import HandoverCommit, ReceivedBlocks


class TransferDelegate(Protocol):
    """The owner of the blocks. Called on the channel's threads: `opened`, then one of the others; not after it revoked.

    A call that had begun when `revoke` was called may still arrive; the owner ignores transfers it does not know.
    """

    def opened(self, transfer_id: int) -> None:
        """A sender has shown the grant's token: blocks are coming."""

    def committed(self, transfer_id: int, commit: HandoverCommit, received: ReceivedBlocks) -> None:
        """All granted blocks are here, verified, and nobody writes to them any more.

        A TwinstageError that this raises is what the sender gets instead of the acknowledgement.
        """

    def failed(self, transfer_id: int, error: TransferError) -> None:
        """The sender aborted, went away or broke the rules.

        A late write may still land: the blocks may be reused once `KvReceiver.revoke` has reported the fence.
        """
