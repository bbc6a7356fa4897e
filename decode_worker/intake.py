"""Where KV blocks come in: the border between the threads of the KV channel and the rest of the worker.

A grant is open from `open` until it is committed or withdrawn, whichever comes first; the other one then learns that it
came too late. A commit goes to the engine under the same lock that decides the race, so that an abort which finds the
grant committed also finds the sequences in the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from decode_worker.grants import num_handed_over
from twinstage.engine.choices import choice_spec
from twinstage.engine.core import EngineCore
from twinstage.errors import StaleHandle, TransferError
from twinstage.grammar.matcher import SequenceMatcher
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.fork import fork
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
    ended: set[int] = field(default_factory=set)  # choices that shall not begin
    matcher: SequenceMatcher | None = None  # of the sequence's constraint

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the blocks must hold."""
        return num_handed_over(self.spec)


class Intake:
    """The receiver's delegate. Its callbacks run on the channel's threads, `on_rejected` also on the engine's."""

    def __init__(
        self,
        *,
        submit: Callable[[Callable[[EngineCore], None]], Future[None]],
        copy_block: Callable[[int, int], None],
        on_opened: Callable[[int], None],
        on_committed: Callable[[int, ReceivedBlocks, frozenset[int]], None],
        on_failed: Callable[[int, TransferError], None],
        on_rejected: Callable[[RequestId, BaseException], None],
    ) -> None:
        """`copy_block` copies the bytes of a block; `on_committed` also hears which choices go on."""
        self._submit = submit
        self._copy_block = copy_block
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

    def end_choice(self, transfer_id: int, index: int) -> bool:
        """Let a choice of a grant that is not committed never begin. False: it is, and the choice is in the engine."""
        with self._lock:
            if (grant := self._grants.get(transfer_id)) is None:
                return False
            grant.ended.add(index)
            return True

    def opened(self, transfer_id: int) -> None:
        """A prefill worker came for the grant."""
        self._on_opened(transfer_id)

    def committed(self, transfer_id: int, commit: HandoverCommit, received: ReceivedBlocks) -> None:
        """All blocks have arrived and were verified: let the engine go on with the tokens after the first ones.

        Raises StaleHandle when the grant is not open any more, TransferError when the commit is about something else:
        the transfer has then failed, as nobody can commit it again.
        """
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is None:
                raise StaleHandle(f"transfer {transfer_id} is not expected any more")
            first_tokens = {index: token for index, token in commit.first_tokens if index not in grant.ended}
            if (mismatch := _mismatch(commit, grant, first_tokens)) is not None:
                self._on_failed(transfer_id, mismatch)
                raise mismatch
            del self._grants[transfer_id]
            # First, so that it is known before any token.
            self._on_committed(transfer_id, received, frozenset(first_tokens))
            added = self._submit(lambda core: _add(core, grant, first_tokens, self._copy_block))
        added.add_done_callback(lambda outcome: self._check_added(outcome, grant))

    def _check_added(self, outcome: Future[None], grant: OpenGrant) -> None:
        """An engine that did not take the sequences did not take their blocks either."""
        if (error := outcome.exception()) is not None:
            grant.table.release()
            self._on_rejected(grant.key, error)

    def failed(self, transfer_id: int, error: TransferError) -> None:
        """The sender aborted, went away or broke the rules."""
        self._on_failed(transfer_id, error)


def _mismatch(commit: HandoverCommit, grant: OpenGrant, first_tokens: dict[int, int]) -> TransferError | None:
    spec = grant.spec
    if commit.request_id != spec.request_id:
        return TransferError(f"the commit is for request {commit.request_id}, the grant for {spec.request_id}")
    if commit.num_tokens != grant.num_tokens:
        return TransferError(f"the commit brings {commit.num_tokens} tokens, the grant is for {grant.num_tokens}")
    if any(index >= spec.num_choices for index in first_tokens):
        return TransferError(
            f"the commit is for choices {list(first_tokens)}, the grant for {spec.num_choices} of them"
        )
    if not first_tokens:
        return StaleHandle("every choice that the commit goes on with was ended meanwhile")
    return None


def _add(
    core: EngineCore, grant: OpenGrant, first_tokens: dict[int, int], copy_block: Callable[[int, int], None]
) -> None:
    """On the engine's thread: a sequence for each choice, or none."""
    spec = replace(grant.spec, request_id=grant.key)
    if spec.num_choices == 1:
        core.add_prefilled(
            spec, grant.table, ProducedToken(token_id=first_tokens[0]), hashes=grant.hashes, matcher=grant.matcher
        )
        return
    specs = [choice_spec(spec, index) for index in first_tokens]
    names = [choice.request_id for choice in specs]
    block_size = core.config.block_size
    tables = fork(grant.table, names, num_tokens=grant.num_tokens, block_size=block_size, copy_block=copy_block)
    try:
        for choice, table, token_id in zip(specs, tables, first_tokens.values(), strict=True):
            hashes = grant.hashes.copy() if grant.hashes is not None else None
            matcher = grant.matcher.copy() if grant.matcher is not None else None
            core.add_prefilled(choice, table, ProducedToken(token_id=token_id), hashes=hashes, matcher=matcher)
    except BaseException:
        for name, table in zip(names, tables, strict=True):
            core.abort(name)
            table.release()
        raise
