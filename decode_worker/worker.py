"""A decode worker: from reserved KV blocks to the last token.

    RESERVED    blocks are granted; nobody has come to fill them
    RECEIVING   a prefill worker may be writing
    QUEUED      all blocks arrived and were verified, or they were lost to others (preempted) and are computed again
    DECODING    tokens are produced
    DONE        finished, ended by the router, or failed

Everything about a request is decided on the event loop; the engine's thread and the channel's threads report to it.
`_end` is the one way in which a request ends, and gives its blocks back through whoever may still touch them: the
receiver (`revoke`, which answers when no late write can land) or the engine.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from decode_worker.grants import block_names, blocks_needed, make_grant
from decode_worker.intake import Intake, OpenGrant
from decode_worker.request import DecodeRequest, RequestBook, blamed, totals_of
from decode_worker.reservations import Reservations, Wish
from decode_worker.sessions import Session, SessionFailure, SessionMessage, Sessions, StepMessages, session_lost
from twinstage.engine.core import EngineCore, StepOutput
from twinstage.engine.loop import EngineLoop
from twinstage.errors import Cancelled, Draining, InternalError, TransferError, TwinstageError
from twinstage.hosting.assemble import EngineParts
from twinstage.hosting.load_board import LoadBoard, pool_load
from twinstage.hosting.sequence_check import check_sequence
from twinstage.kv.block_pool import BlockTable
from twinstage.lifecycle import CancelledOutcome, DecodePhase, Failed, Finished, Outcome
from twinstage.telemetry.ends import log_end
from twinstage.telemetry.log import get_logger
from twinstage.transfer.receiver import KvReceiver
from twinstage.transfer.values import ReceivedBlocks
from twinstage.types import KvGrant, RequestId, Role, SequenceSpec, WorkerDescription, WorkerLoad

logger = get_logger(__name__)

MAX_LEASE_S = 600.0  # the router ends its requests itself; the lease is for the time when it cannot


class DecodeWorker:
    """Grants blocks, takes hand-overs in and generates. Made and used on one event loop."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        open_receiver: Callable[[Intake], KvReceiver],
        description: WorkerDescription,
        tokenizer_bundle: bytes,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.description = description
        self.tokenizer_bundle = tokenizer_bundle
        self.loads = LoadBoard(self._load)
        self._parts = parts
        self._loop = loop
        self._engine = EngineLoop(parts.core, self._on_step, name="decode-engine")
        self._intake = Intake(
            submit=self._engine.submit,
            on_opened=lambda transfer_id: self._call_soon(self._opened, transfer_id),
            on_committed=lambda transfer_id, received: self._call_soon(self._committed, transfer_id, received),
            on_failed=lambda transfer_id, error: self._call_soon(self._transfer_failed, transfer_id, error),
            on_rejected=lambda key, error: self._call_soon(self._rejected, key, error),
        )
        self._reservations: Reservations[DecodeRequest] = Reservations(
            parts.pool,
            may_take=lambda: not self._engine.load().waiting,  # preempted sequences come first
            headroom=lambda: self._engine.load().running,  # each may soon need one more
            give_up=lambda request: self._end(request, CancelledOutcome()),
            on_change=self._note_change,
        )
        self._sessions = Sessions()
        self._requests = RequestBook()
        self._finished = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        parts.pool.add_free_listener(lambda: self._call_soon(self._blocks_freed))
        self._receiver = open_receiver(self._intake)
        self._receiver.start()
        for endpoint in self._receiver.endpoints:
            logger.info("kv listener ready", transport=endpoint.transport, address=endpoint.address)
        self._engine.start()

    # --- the door ------------------------------------------------------------------------------------

    def open_session(self, session_id: str) -> Session:
        """A router's new session. Raises AlreadyExists, or Draining."""
        if self._draining:
            raise Draining("this decode worker is shutting down")
        return self._sessions.open(session_id)

    def end_session(self, session: Session) -> None:
        """The router has gone: end all that it asked for. Idempotent."""
        if not self._sessions.remove(session):
            return
        self._reservations.refuse(session_lost(session.session_id), session_id=session.session_id)
        for request in self._requests.live(session):
            self._end(request, CancelledOutcome())
        self._note_change()

    def abort(self, session: Session, request_id: RequestId) -> None:
        """The router ends a request; nothing happens when it has ended already."""
        ended = Cancelled(f"request {request_id} was ended by the router")
        self._reservations.refuse(ended, session_id=session.session_id, request_id=request_id)
        for request in self._requests.live(session):
            if request.spec.request_id == request_id:
                self._end(request, CancelledOutcome())

    async def reserve(self, session_id: str, spec: SequenceSpec, *, timeout_s: float) -> tuple[KvGrant, float]:
        """Reserve blocks for a request and return the grant, and the seconds it waited for them.

        Raises InvalidRequest, KvExhausted (it can never fit, or too many wait), DeadlineExceeded, Draining, or
        WorkerLost when the session is not open.
        """
        if self._draining:
            raise Draining("this decode worker is shutting down")
        session = self._sessions.get(session_id)
        check_sequence(spec, self.description.model)
        needed = blocks_needed(spec, self._parts.layout, pool_blocks=self._parts.pool.num_blocks)
        transfer_id = secrets.randbits(63)
        key = RequestId(f"{spec.request_id}#{transfer_id:x}")
        hashes = block_names(spec, self._parts.hasher)
        wish = Wish(request_id=spec.request_id, session_id=session_id, owner=key, num_blocks=needed, hashes=hashes)
        started_s = time.monotonic()
        deadline_s = started_s + timeout_s

        def use(table: BlockTable) -> DecodeRequest:
            lease_s = min(max(deadline_s - time.monotonic(), 0.0), MAX_LEASE_S)
            endpoints = self._receiver.endpoints
            grant = make_grant(table, self.description, transfer_id=transfer_id, endpoints=endpoints, lease_s=lease_s)
            self._receiver.expect(grant)  # raises before anything else knows of the grant
            lease = self._loop.call_later(lease_s, self._lease_ended, transfer_id)
            request = DecodeRequest(
                key=key, spec=spec, session=session, table=table, grant=grant, lease=lease, deadline_s=deadline_s
            )
            self._requests.enter(request)
            self._intake.open(transfer_id, OpenGrant(key=key, spec=spec, table=table, hashes=hashes))
            return request

        request = await self._reservations.take(wish, use, timeout_s=timeout_s)
        return request.grant, time.monotonic() - started_s

    # --- from other threads --------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        self._call_soon(self._deliver, output)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(partial(callback, *arguments))

    # --- on the event loop ---------------------------------------------------------------------------

    def _opened(self, transfer_id: int) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            request.lifecycle.advance(DecodePhase.RECEIVING)

    def _committed(self, transfer_id: int, received: ReceivedBlocks) -> None:
        if (request := self._requests.committed(transfer_id)) is not None:
            request.lease.cancel()
            request.kv_bytes_received = received.kv_bytes
            request.lifecycle.advance(DecodePhase.QUEUED)

    def _transfer_failed(self, transfer_id: int, error: TransferError) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            self._end(request, Failed(blamed(request, error)))

    def _rejected(self, key: RequestId, error: BaseException) -> None:
        """The engine did not take a sequence; its blocks are free."""
        if (request := self._requests.get(key)) is not None:
            self._settle(request, Failed(error if isinstance(error, TwinstageError) else InternalError(str(error))))

    def _lease_ended(self, transfer_id: int) -> None:
        if (request := self._requests.expected(transfer_id)) is not None:
            error = TransferError("nobody filled the granted KV blocks before the lease ended")
            self._end(request, Failed(blamed(request, error)))

    def _deliver(self, output: StepOutput) -> None:
        told = StepMessages()
        stats = {entry.request_id: entry for entry in output.finished}
        for key in output.preempted:
            request = self._requests.get(key)
            if request is not None and request.lifecycle.phase is DecodePhase.DECODING:
                request.lifecycle.advance(DecodePhase.QUEUED)
        for chunk in output.chunks:
            if (request := self._requests.get(chunk.request_id)) is None:
                continue  # ended while the step ran
            if request.lifecycle.phase is DecodePhase.QUEUED:
                request.lifecycle.advance(DecodePhase.DECODING)
            totals = totals_of(request, stats[request.key]) if chunk.finish is not None else None
            told.add(request.session, replace(chunk, request_id=request.spec.request_id), totals)
            if chunk.finish is not None:
                self._settle(request, Finished(chunk.finish.reason))
        for session, message in told.messages():
            self._tell(session, message)
        for failure in output.failed:
            if (request := self._requests.get(failure.request_id)) is not None:
                self._settle(request, Failed(failure.error))
        self._blocks_freed()

    def _tell(self, session: Session, message: SessionMessage) -> None:
        """Send to a router; one that does not read loses its session, and all that belongs to it ends."""
        session.put(message)
        if session.closed:
            self.end_session(session)

    def _end(self, request: DecodeRequest, outcome: Outcome) -> None:
        """End a request, if it lives, and give its blocks back through whoever may still touch them."""
        if request.lifecycle.outcome is not None:
            return
        self._requests.hold(request.key)
        self._settle(request, outcome)
        if self._intake.withdraw(request.grant.transfer_id):
            self._receiver.revoke(request.grant.transfer_id, partial(self._fenced, request))
        else:
            dropped = self._engine.submit(partial(_drop, request.key))
            dropped.add_done_callback(lambda _: self._call_soon(self._freed, request.key))

    def _settle(self, request: DecodeRequest, outcome: Outcome) -> None:
        """The request is over; tell the router if it does not know."""
        phase = request.lifecycle.phase
        request.lifecycle.finish(outcome)
        request.lease.cancel()
        self._requests.end(request)
        self._finished += isinstance(outcome, Finished)
        log_end(Role.DECODE, request.spec.request_id, phase=phase, outcome=outcome)
        if isinstance(outcome, Failed):
            self._tell(request.session, SessionFailure(request_id=request.spec.request_id, error=outcome.error))
        self._note_change()

    def _fenced(self, request: DecodeRequest) -> None:
        """No late write can land any more. On any thread."""
        request.table.release()
        self._call_soon(self._freed, request.key)

    def _freed(self, key: RequestId) -> None:
        self._requests.freed(key)
        self._blocks_freed()

    def _blocks_freed(self) -> None:
        self._reservations.serve()
        self._note_change()

    def _note_change(self) -> None:
        if self._requests.is_empty and not len(self._reservations):
            self._idle.set()
        else:
            self._idle.clear()
        self.loads.changed()

    def reset_prefix_cache(self) -> int:
        """Forget what is in the KV blocks; returns of how many."""
        dropped = self._parts.pool.reset_prefix_cache()
        self.loads.changed()
        return dropped

    def _load(self) -> WorkerLoad:
        load = self._engine.load()
        return replace(
            pool_load(self._parts.pool),
            running=load.running,
            waiting=load.waiting + len(self._reservations),
            waiting_tokens=load.waiting_tokens,
            finished=self._finished,
            kv_bytes_received=self._receiver.bytes_received,
            draining=self._draining,
        )

    # --- the end -------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Take nothing new from now on; what waits for blocks is refused, what has them goes on."""
        self._draining = True
        self._reservations.refuse(Draining("this decode worker is shutting down"))
        self._note_change()

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing is being freed any more."""
        await self._idle.wait()

    def end_streams(self) -> None:
        """Let sessions and load watches end once their last message is delivered."""
        self.loads.end()
        self._sessions.close_all(Draining("this decode worker has shut down"))

    def abort_all(self) -> None:
        """End everything that runs."""
        for request in self._requests.live():
            self._end(request, Failed(Draining("this decode worker was shut down")))

    def close(self) -> int:
        """Join the threads, check the pool's books and give the memory back; returns the number of leaked blocks."""
        self._receiver.close()
        self._engine.stop()
        return self._parts.close()


def _drop(key: RequestId, core: EngineCore) -> None:
    """On the engine's thread."""
    core.abort(key)
