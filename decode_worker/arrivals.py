"""Requests on their way in: from the wish for KV blocks to the hand-over that the engine takes.

    reserve ──blocks──> granted ──a prefill worker comes──> receiving ──commit, verified──> the engine's
       └── waits while the pool is full ──┘        └── lease over, transfer failed, given up ──> fenced, blocks free

Everything is decided on the event loop; the channel's threads report to it through `Intake`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial

from decode_worker.grants import blocks_needed, make_grant, num_handed_over
from decode_worker.intake import Intake, OpenGrant
from decode_worker.request import DecodeRequest, RequestBook, blamed
from decode_worker.reservations import Reservations, Wish
from decode_worker.sessions import Session
from twinstage.engine.loop import EngineLoop
from twinstage.errors import KvExhausted, TransferError, TwinstageError
from twinstage.grammar.matcher import SequenceMatcher
from twinstage.hosting.assemble import EngineParts
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.prefix_index import HashChain
from twinstage.lifecycle import CancelledOutcome, DecodePhase, Failed, Outcome
from twinstage.telemetry.log import get_logger
from twinstage.transfer.receiver import KvReceiver
from twinstage.transfer.values import ReceivedBlocks
from twinstage.types import RequestId, SequenceSpec, WorkerDescription

MAX_REQUESTS = 8192  # that have their blocks: some may share all of them with others, so the pool is no limit
# A router ends its requests itself, and the session of one that is gone or silent ends with all it had; this lease is
# for a router that lives and forgets.
MAX_LEASE_S = 600.0

logger = get_logger(__name__)


class Arrivals:
    """Grants blocks and takes hand-overs in. Belongs to one event loop.

    Granted requests are entered in `requests`; `end` is called when one of them cannot be filled, `on_rejected` when
    the engine did not take what had arrived, `on_change` when another number of requests waits.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        engine: EngineLoop,
        open_receiver: Callable[[Intake], KvReceiver],
        description: WorkerDescription,
        requests: RequestBook,
        loop: asyncio.AbstractEventLoop,
        end: Callable[[DecodeRequest, Outcome], None],
        on_rejected: Callable[[RequestId, BaseException], None],
        on_change: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._description = description
        self._requests = requests
        self._loop = loop
        self._end = end
        self._intake = Intake(
            submit=engine.submit,
            copy_block=parts.memory.copy_block,
            on_opened=lambda transfer_id: self._call_soon(self._opened, transfer_id),
            on_committed=lambda *what: self._call_soon(self._committed, *what),
            on_failed=lambda transfer_id, error: self._call_soon(self._transfer_failed, transfer_id, error),
            on_rejected=lambda key, error: self._call_soon(on_rejected, key, error),
        )
        self._reservations: Reservations[DecodeRequest] = Reservations(
            parts.pool,
            may_take=lambda: not engine.load().waiting,  # preempted sequences come first
            headroom=lambda: engine.load().running,  # each may soon need one more
            give_up=lambda request: end(request, CancelledOutcome()),
            on_change=on_change,
        )
        self._receiver = open_receiver(self._intake)

    def start(self) -> None:
        """Let prefill workers in."""
        self._receiver.start()
        for endpoint in self._receiver.endpoints:
            logger.info("kv listener ready", transport=endpoint.transport, address=endpoint.address)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._reservations)

    @property
    def bytes_received(self) -> int:
        return self._receiver.bytes_received

    async def reserve(
        self,
        session: Session,
        spec: SequenceSpec,
        *,
        hashes: HashChain | None,
        matcher: SequenceMatcher | None,
        deadline_s: float,
    ) -> DecodeRequest:
        """A request with a grant, as soon as there are blocks for it; `hashes` name what they shall hold.

        `matcher` is that of the sequence's constraint.

        Raises KvExhausted (it can never fit, or too many wait), DeadlineExceeded at `deadline_s` (monotonic), or what
        `refuse` was called with.
        """
        if len(self._requests) >= MAX_REQUESTS:
            raise KvExhausted(f"this decode worker has {MAX_REQUESTS} requests already")
        needed = blocks_needed(
            spec,
            self._parts.layout,
            pool_blocks=self._parts.pool.num_blocks,
            max_num_sequences=self._description.max_num_sequences,
        )
        transfer_id = secrets.randbits(63)
        key = RequestId(f"{spec.request_id}#{transfer_id:x}")

        def use(table: BlockTable) -> DecodeRequest:
            request = self._grant(table, key, spec, session, transfer_id=transfer_id, deadline_s=deadline_s)
            self._intake.open(transfer_id, OpenGrant(key=key, spec=spec, table=table, hashes=hashes, matcher=matcher))
            return request

        wish = Wish(
            request_id=spec.request_id,
            session_id=session.session_id,
            owner=key,
            num_blocks=needed,
            hashes=hashes,
            priority=spec.priority,
        )
        return await self._reservations.take(wish, use, timeout_s=deadline_s - time.monotonic())

    def _grant(
        self,
        table: BlockTable,
        key: RequestId,
        spec: SequenceSpec,
        session: Session,
        *,
        transfer_id: int,
        deadline_s: float,
    ) -> DecodeRequest:
        """Give the right to fill `table`, and enter the request that waits for it."""
        lease_s = min(max(deadline_s - time.monotonic(), 0.0), MAX_LEASE_S)
        grant = make_grant(
            table,
            self._description,
            num_blocks=self._parts.layout.blocks_for(num_handed_over(spec)),
            transfer_id=transfer_id,
            endpoints=self._receiver.endpoints,
            lease_s=lease_s,
        )
        self._receiver.expect(grant)  # raises before anything else knows of the grant
        lease = self._loop.call_later(lease_s, self._lease_ended, transfer_id)
        request = DecodeRequest(
            key=key, spec=spec, session=session, table=table, grant=grant, lease=lease, deadline_s=deadline_s
        )
        self._requests.enter(request)
        return request

    def serve(self) -> None:
        """Give blocks to those who wait, as far as the pool allows."""
        self._reservations.serve()

    def refuse(
        self, error: TwinstageError, *, session_id: str | None = None, request_id: RequestId | None = None
    ) -> None:
        """Fail those who wait for blocks: all of them, those of one session, or one request of it."""
        self._reservations.refuse(error, session_id=session_id, request_id=request_id)

    def give_up(self, request: DecodeRequest, on_freed: Callable[[], None]) -> bool:
        """Free the blocks of a request that ends; `on_freed` is called, on any thread, once no late write can land.

        False, with nothing done, when its blocks were committed: they are the engine's.
        """
        transfer_id = request.grant.transfer_id
        if not self._intake.withdraw(transfer_id):
            return False

        def fenced() -> None:
            request.table.release()
            on_freed()

        self._receiver.revoke(transfer_id, fenced)
        return True

    def end_choice(self, request: DecodeRequest, index: int) -> bool:
        """One choice of a request shall not begin. False, with nothing done, when the blocks were committed."""
        return self._intake.end_choice(request.grant.transfer_id, index)

    def close(self) -> None:
        """End the channel's threads."""
        self._receiver.close()

    # --- what the channel reports ----------------------------------------------------------------------

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(partial(callback, *arguments))

    def _opened(self, transfer_id: int) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            request.lifecycle.advance(DecodePhase.RECEIVING)

    def _committed(self, transfer_id: int, received: ReceivedBlocks, going_on: frozenset[int]) -> None:
        if (request := self._requests.committed(transfer_id)) is not None:
            request.lease.cancel()
            request.kv_bytes_received = received.kv_bytes
            request.running &= going_on
            request.lifecycle.advance(DecodePhase.QUEUED)
            if not request.running:  # the last one of those was ended in this moment
                self._end(request, CancelledOutcome())

    def _transfer_failed(self, transfer_id: int, error: TransferError) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            self._end(request, Failed(blamed(request, error)))

    def _lease_ended(self, transfer_id: int) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            error = TransferError("nobody filled the granted KV blocks before the lease ended")
            self._end(request, Failed(blamed(request, error)))
