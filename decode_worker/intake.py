"""Where KV blocks come in: the border between the threads of the KV channel and the rest of the worker.

A grant is open from `open` until it is committed or withdrawn, whichever comes first; the other one then learns that it
came too late. A commit goes to the engine under the same lock that decides the race, so that an abort which finds the
grant committed also finds the sequence in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from twinstage.engine.core import EngineCore
from twinstage.errors import StaleHandle, TransferError
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.prefix_index import HashChain
from twinstage.transfer.values import HandoverCommit, ReceivedBlocks
from twinstage.types import ProducedToken, RequestId, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGrant:
    """Blocks that wait to be filled. `key` is the request's name in the engine."""

    key: RequestId
    spec: SequenceSpec
    table: BlockTable
    hashes: HashChain | None = None  # names of the complete blocks, for the prefix cache

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the blocks must hold."""
        return len(self.spec.prompt_token_ids) + len(self.spec.resumed_token_ids)


class Intake:
    """The receiver's delegate. Its callbacks run on the channel's threads, `on_rejected` also on the engine's."""

    def __init__(
        self,
        *,
        submit: Callable[[Callable[[EngineCore], None]], Future[None]],
        on_opened: Callable[[int], None],
        on_committed: Callable[[int, ReceivedBlocks], None],
        on_failed: Callable[[int, TransferError], None],
        on_rejected: Callable[[RequestId, BaseException], None],
    ) -> None:
        self._submit = submit
        self._on_opened = on_opened
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._on_rejected = on_rejected
        self._lock = threading.Lock()
        self._grants: dict[int, OpenGrant] = {}

    def open(self, transfer_id: int, grant: OpenGrant) -> None:
        """The blocks of `grant` may be filled from now on."""
        with self._lock:
            self._grants[transfer_id] = grant

    def withdraw(self, transfer_id: int) -> bool:
        """Close a grant that is not committed. False: it is, and its blocks belong to the engine."""
        with self._lock:
            return self._grants.pop(transfer_id, None) is not None

    def opened(self, transfer_id: int) -> None:
        """A prefill worker came for the grant."""
        self._on_opened(transfer_id)

    def committed(self, transfer_id: int, commit: HandoverCommit, received: ReceivedBlocks) -> None:
        """All blocks have arrived and were verified: let the engine go on with the token after the first.

        Raises StaleHandle when the grant is not open any more, TransferError when the commit is about something else:
        the transfer has then failed, as nobody can commit it again.
        """
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is None:
                raise StaleHandle(f"transfer {transfer_id} is not expected any more")
            if (mismatch := _mismatch(commit, grant)) is not None:
                self._on_failed(transfer_id, mismatch)
                raise mismatch
            del self._grants[transfer_id]
            self._on_committed(transfer_id, received)  # first, so that it is known before any token
            added = self._submit(lambda core: _add(core, grant, commit.token))
        added.add_done_callback(lambda outcome: self._check_added(outcome, grant))

    def _check_added(self, outcome: Future[None], grant: OpenGrant) -> None:
        """An engine that did not take the sequence did not take its blocks either."""
        if (error := outcome.exception()) is not None:
            grant.table.release()
            self._on_rejected(grant.key, error)

    def failed(self, transfer_id: int, error: TransferError) -> None:
        """The sender aborted, went away or broke the rules."""
        self._on_failed(transfer_id, error)


def _mismatch(commit: HandoverCommit, grant: OpenGrant) -> TransferError | None:
    if commit.request_id != grant.spec.request_id:
        return TransferError(f"the commit is for request {commit.request_id}, the grant for {grant.spec.request_id}")
    if commit.num_tokens != grant.num_tokens:
        return TransferError(f"the commit brings {commit.num_tokens} tokens, the grant is for {grant.num_tokens}")
    return None


def _add(core: EngineCore, grant: OpenGrant, token: ProducedToken) -> None:
    core.add_prefilled(replace(grant.spec, request_id=grant.key), grant.table, token, hashes=grant.hashes)
