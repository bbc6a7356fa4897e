"""A decode worker: from reserved KV blocks to the last token.

    RESERVED    blocks are granted; nobody has come to fill them
    RECEIVING   a prefill worker may be writing
    QUEUED      all blocks arrived and were verified, or they were lost to others (preempted) and are computed again
    DECODING    tokens are produced
    DONE        finished, ended by the router, or failed

Everything about a request is decided on the event loop; the engine's thread and the channel's threads report to it.
Until its blocks are committed, a request is in `arrivals`; then it is in the engine. `_end` is the one way in which it
ends, and gives its blocks back through whichever of the two may still touch them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from decode_worker.arrivals import Arrivals
from decode_worker.deliveries import Deliveries
from decode_worker.grants import block_names
from decode_worker.intake import Intake
from decode_worker.request import DecodeRequest, RequestBook
from decode_worker.sessions import Session, SessionFailure, SessionMessage, Sessions, session_lost
from twinstage.engine.core import EngineCore, StepOutput
from twinstage.engine.loop import EngineLoop
from twinstage.errors import Cancelled, Draining, InternalError, TwinstageError
from twinstage.hosting.assemble import EngineParts
from twinstage.hosting.books import Leaks
from twinstage.hosting.door import Door
from twinstage.hosting.load_board import LoadBoard, pool_load
from twinstage.hosting.sequence_check import check_sequence
from twinstage.lifecycle import CancelledOutcome, Failed, Finished, Outcome
from twinstage.telemetry.ends import log_end
from twinstage.telemetry.log import get_logger
from twinstage.transfer.receiver import KvReceiver
from twinstage.types import KvGrant, RequestId, Role, SequenceSpec, WorkerDescription, WorkerLoad

logger = get_logger(__name__)


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
        self._sessions = Sessions()
        self._requests = RequestBook()
        self._leaks = Leaks(parts.pool, knows=self._requests.knows)
        self._arrivals = Arrivals(
            parts,
            engine=self._engine,
            open_receiver=open_receiver,
            description=description,
            requests=self._requests,
            loop=loop,
            end=self._end,
            on_rejected=self._rejected,
            on_change=self._note_change,
        )
        self._deliveries = Deliveries(self._requests, tell=self._tell, settle=self._settle, end=self._end)
        self._finished = 0
        self._door = Door("decode worker")
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()
        parts.pool.add_free_listener(lambda: self._call_soon(self._blocks_freed))
        self._arrivals.start()
        self._engine.start()

    # --- the door ------------------------------------------------------------------------------------

    def open_session(self, session_id: str) -> Session:
        """A router's new session. Raises AlreadyExists, or Draining when the worker is about to end."""
        if self._door.is_closed_for_good:
            raise self._door.refusal()
        return self._sessions.open(session_id)

    def end_session(self, session: Session) -> None:
        """The router has gone: end all that it asked for. Idempotent."""
        if not self._sessions.remove(session):
            return
        if self._is_ending and not self._sessions:
            self.loads.end()
        self._arrivals.refuse(session_lost(session.session_id), session_id=session.session_id)
        for request in self._requests.live(session):
            self._end(request, CancelledOutcome())
        self._note_change()

    def abort(self, session: Session, request_id: RequestId, choice: int | None = None) -> None:
        """The router ends a request, or one choice of it; nothing happens when it has ended already."""
        if choice is not None:
            self._abort_choice(session, request_id, choice)
            return
        ended = Cancelled(f"request {request_id} was ended by the router")
        self._arrivals.refuse(ended, session_id=session.session_id, request_id=request_id)
        for request in self._requests.live(session):
            if request.spec.request_id == request_id:
                self._end(request, CancelledOutcome())

    def _abort_choice(self, session: Session, request_id: RequestId, index: int) -> None:
        for request in self._requests.live(session):
            if request.spec.request_id != request_id or index not in request.running:
                continue
            if len(request.running) == 1:
                self._end(request, CancelledOutcome())
                continue
            self._requests.end_choice(request, index)
            if not self._arrivals.end_choice(request, index):
                self._drop((request.names[index],))

    async def reserve(self, session_id: str, spec: SequenceSpec, *, timeout_s: float) -> tuple[KvGrant, float]:
        """Reserve blocks for a request and return the grant, and the seconds it waited for them.

        Raises InvalidRequest, KvExhausted (it can never fit, or too many wait), DeadlineExceeded, Draining, or
        WorkerLost when the session is not open.
        """
        self._admit(session_id)
        check_sequence(spec, self.description.model)
        started_s = time.monotonic()
        hashes = await block_names(spec, self._parts.hasher)
        matcher = await self._parts.matcher_for(spec)
        session = self._admit(session_id)  # much may have happened in between
        deadline_s = started_s + timeout_s
        request = await self._arrivals.reserve(session, spec, hashes=hashes, matcher=matcher, deadline_s=deadline_s)
        return request.grant, time.monotonic() - started_s

    def _admit(self, session_id: str) -> Session:
        """Raises Draining, or WorkerLost when the session is not open."""
        self._door.enter()
        return self._sessions.get(session_id)

    # --- from other threads --------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        self._call_soon(self._deliver, output)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(partial(callback, *arguments))

    # --- on the event loop ---------------------------------------------------------------------------

    def _rejected(self, key: RequestId, error: BaseException) -> None:
        """The engine did not take a sequence; its blocks are free."""
        if (request := self._requests.get(key)) is not None:
            self._settle(request, Failed(error if isinstance(error, TwinstageError) else InternalError(str(error))))

    def _deliver(self, output: StepOutput) -> None:
        self._deliveries.deliver(output)
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
        held = self._requests.hold(request.names)
        self._settle(request, outcome)
        if not self._arrivals.give_up(request, lambda: self._call_soon(self._freed, held)):
            self._drop(request.names)
            self._requests.freed(held)

    def _drop(self, names: tuple[RequestId, ...]) -> None:
        """Let the engine end sequences; their blocks are held in these names until it has."""
        held = self._requests.hold(names)
        dropped = self._engine.submit(partial(_abort, names))
        dropped.add_done_callback(lambda _: self._call_soon(self._freed, held))

    def _settle(self, request: DecodeRequest, outcome: Outcome) -> None:
        """The request is over; tell the router if it does not know."""
        phase = request.lifecycle.phase
        request.lifecycle.finish(outcome)
        request.lease.cancel()
        self._requests.end(request)
        self._finished += isinstance(outcome, Finished)
        log_end(Role.DECODE, request.spec, phase=phase, outcome=outcome)
        if isinstance(outcome, Failed):
            self._tell(request.session, SessionFailure(request_id=request.spec.request_id, error=outcome.error))
        self._note_change()

    def _freed(self, held: int) -> None:
        self._requests.freed(held)
        self._blocks_freed()

    def _blocks_freed(self) -> None:
        self._arrivals.serve()
        self._note_change()

    def _note_change(self) -> None:
        if self._unfinished:
            self._idle.clear()
        else:
            self._idle.set()
        self.loads.changed()

    @property
    def _unfinished(self) -> int:
        return len(self._requests) + self._arrivals.num_waiting

    def reset_prefix_cache(self) -> int:
        """Forget what is in the KV blocks; returns of how many."""
        dropped = self._parts.pool.reset_prefix_cache()
        self.loads.changed()
        return dropped

    def _load(self) -> WorkerLoad:
        load = self._engine.load()
        return replace(
            pool_load(self._parts.pool, self._leaks),
            running=load.running,
            waiting=load.waiting + self._arrivals.num_waiting,
            waiting_tokens=load.waiting_tokens,
            finished=self._finished,
            kv_bytes_received=self._arrivals.bytes_received,
            draining=self._door.is_closed,
            unfinished=self._unfinished,
        )

    # --- the end -------------------------------------------------------------------------------------

    def begin_drain(self, *, for_good: bool = False, fault: str = "") -> None:
        """Take nothing new from now on; what waits for blocks is refused, what has them goes on."""
        self._door.close(for_good=for_good, fault=fault)
        self._arrivals.refuse(self._door.refusal())
        self._note_change()

    def end_drain(self) -> None:
        """Take new requests again. Raises Draining when the worker is about to end or has a fault."""
        self._door.open()
        self._note_change()

    def check_books(self) -> None:
        """Raise IntegrityError unless the pool's books balance."""
        self._parts.pool.check_integrity()

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing is being freed any more."""
        await self._idle.wait()

    def end_streams(self) -> None:
        """Let sessions end once their last message is delivered, and then the load watches.

        Without load reports a router takes the worker for lost, and reads its session no further.
        """
        self._is_ending = True
        self._sessions.close_all(Draining("this decode worker has shut down"))
        if not self._sessions:
            self.loads.end()

    def abort_all(self) -> None:
        """End everything that runs."""
        for request in self._requests.live():
            self._end(request, Failed(Draining("this decode worker was shut down")))

    def close(self) -> int:
        """Join the threads, check the pool's books and give the memory back; returns the number of leaked blocks."""
        self._arrivals.close()
        self._engine.stop()
        return self._parts.close()


def _abort(names: tuple[RequestId, ...], core: EngineCore) -> None:
    """On the engine's thread."""
    for name in names:
        core.abort(name)
