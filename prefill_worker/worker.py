"""A prefill worker for a generative model: from a prompt to its first token and to KV blocks on a decode worker.

    arrivals    calls whose grant is still to come; not yet requests
    QUEUED      in the engine's queue; the connection to the decode worker is being made
    COMPUTING   chunk by chunk; finished blocks are already on their way
    SENDING     the first token has gone to the router; the rest of the blocks, the commit, the acknowledgement
    DONE        handed over, finished with its first token, cancelled or failed

Two threads and the event loop take part. Everything about a request is decided on the event loop; the engine thread
computes and feeds the hand-over; the channel's thread reports the transfer's result. `_free` is the one way in which
a request's blocks come back, whatever ended it: the engine computes no more, the transfer stops reading, and then the
engine frees them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

from prefill_worker.arrivals import Arrivals
from prefill_worker.events import FirstToken, HandedOver, PrefillEvent
from prefill_worker.handoff import Handoff
from prefill_worker.request import PrefillRequest, check_fits
from twinstage.engine.core import ComputedChunk, EngineCore, SequenceStats, StepOutput
from twinstage.engine.loop import EngineLoop
from twinstage.errors import Cancelled, Draining, InternalError, Overloaded
from twinstage.grammar.matcher import SequenceMatcher
from twinstage.hosting.assemble import EngineParts
from twinstage.hosting.books import Leaks
from twinstage.hosting.door import Door
from twinstage.hosting.load_board import LoadBoard, pool_load
from twinstage.hosting.sequence_check import check_sequence
from twinstage.lifecycle import CancelledOutcome, Failed, Finished, Outcome, PrefillPhase
from twinstage.telemetry.ends import log_end
from twinstage.telemetry.log import get_logger
from twinstage.transfer.sender import KvSender
from twinstage.transfer.values import HandoverDone, HandoverFailed, TransferOutcome
from twinstage.types import KvGrant, RequestId, Role, SequenceSpec, TokenChunk, WorkerDescription, WorkerLoad

MAX_REQUESTS = 2048  # in progress, most of them waiting in the engine's queue

logger = get_logger(__name__)


class PrefillWorker:
    """Computes prompts and hands them over. Made and used on one event loop."""

    def __init__(
        self,
        parts: EngineParts,
        *,
        sender: KvSender,
        description: WorkerDescription,
        tokenizer_bundle: bytes,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.description = description
        self.tokenizer_bundle = tokenizer_bundle
        self.loads = LoadBoard(self._load)
        self.matcher_for = parts.matcher_for
        self._parts = parts
        self._sender = sender
        self._loop = loop
        self._engine = EngineLoop(parts.core, self._on_step, name="prefill-engine")
        self._requests: dict[RequestId, PrefillRequest] = {}
        self._leaks = Leaks(parts.pool, knows=self._requests.__contains__)
        self._handoffs: dict[RequestId, Handoff] = {}  # the engine thread's
        self._serial = 0
        self._finished = 0
        self._door = Door("prefill worker")
        self.arrivals = Arrivals(self._door, enter=self._check_room, on_change=self._count_changed)
        self._idle = asyncio.Event()
        self._idle.set()
        parts.pool.add_free_listener(lambda: self._call_soon(self.loads.changed))
        self._engine.start()

    # --- the door ------------------------------------------------------------------------------------

    async def prefill(
        self, spec: SequenceSpec, grant: KvGrant | None, *, matcher: SequenceMatcher | None = None
    ) -> AsyncGenerator[PrefillEvent]:
        """Compute `spec`, hand its blocks over under `grant`, and report each step. Closing the iterator cancels it.

        `matcher` is what `matcher_for` gave.

        Raises InvalidRequest, KvExhausted (the prompt can never fit), Overloaded, Draining, TransferError, or what the
        engine failed with.
        """
        request = self._admit(spec, grant, matcher)
        try:
            while (event := await request.events.get()) is not None:
                yield event
            if isinstance(request.lifecycle.outcome, Failed):
                raise request.lifecycle.outcome.error
            if isinstance(request.lifecycle.outcome, CancelledOutcome):
                raise Cancelled(f"request {spec.request_id} was ended by the worker")
        finally:
            self._end(request, CancelledOutcome())

    def _admit(self, spec: SequenceSpec, grant: KvGrant | None, matcher: SequenceMatcher | None) -> PrefillRequest:
        self._check_room()
        check_sequence(spec, self.description.model)
        check_fits(spec, grant, self._parts.layout, pool_blocks=self._parts.pool.num_blocks)
        self._serial += 1
        request = PrefillRequest(key=RequestId(f"{spec.request_id}#{self._serial}"), spec=spec)
        if grant is not None:
            transfer = self._sender.open(grant, lambda outcome: self._call_soon(self._transfer_ended, request, outcome))
            request.handoff = Handoff(
                transfer, block_size=self._parts.layout.block_size, num_cached_blocks=grant.num_cached_blocks
            )
            request.transfer_open = True
        request.in_engine = True
        self._requests[request.key] = request
        self._idle.clear()
        self._engine.submit(partial(self._add, request, matcher))
        return request

    def _check_room(self) -> None:
        self._door.enter()
        if self._num_unfinished >= MAX_REQUESTS:
            raise Overloaded(f"this prefill worker has {MAX_REQUESTS} requests already")

    @property
    def _num_unfinished(self) -> int:
        return len(self._requests) + len(self.arrivals)

    # --- on the engine thread ------------------------------------------------------------------------

    def _add(self, request: PrefillRequest, matcher: SequenceMatcher | None, core: EngineCore) -> None:
        if request.handoff is not None:
            self._handoffs[request.key] = request.handoff
        core.add(replace(request.spec, request_id=request.key), matcher=matcher)

    def _stop(self, key: RequestId, core: EngineCore, *, keep_blocks: bool) -> None:
        self._handoffs.pop(key, None)
        core.abort(key, keep_blocks=keep_blocks)

    def _on_step(self, output: StepOutput) -> None:
        self._call_soon(self._deliver, output)  # the first token waits for no block
        complete = {chunk.request_id for chunk in output.chunks}
        for computed in output.computed:
            if computed.request_id not in complete and (handoff := self._handoffs.get(computed.request_id)) is not None:
                handoff.advance(computed)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(partial(callback, *arguments))

    # --- on the event loop ---------------------------------------------------------------------------

    def _deliver(self, output: StepOutput) -> None:
        for computed in output.computed:
            request = self._requests.get(computed.request_id)
            if request is not None and request.lifecycle.phase is PrefillPhase.QUEUED:
                request.lifecycle.advance(PrefillPhase.COMPUTING)
        for scored in output.scored:
            if (request := self._requests.get(scored.request_id)) is not None:
                request.events.put_nowait(scored.logprobs)
        stats = {entry.request_id: entry for entry in (*output.prefilled, *output.finished)}
        last = {computed.request_id: computed for computed in output.computed}
        for key, chunks in itertools.groupby(output.chunks, key=attrgetter("request_id")):  # of all choices at once
            request = self._requests.get(key)
            if request is not None and request.lifecycle.outcome is None:
                self._first_token(request, tuple(chunks), stats[key], last[key])
        for failure in output.failed:
            if (request := self._requests.get(failure.request_id)) is not None:
                self._end(request, Failed(failure.error))
        self.loads.changed()

    def _first_token(
        self, request: PrefillRequest, chunks: tuple[TokenChunk, ...], stats: SequenceStats, computed: ComputedChunk
    ) -> None:
        first = FirstToken.of(request.spec, chunks, stats)
        request.events.put_nowait(first)
        if (finish := chunks[-1].finish) is not None and not first.going_on:
            self._end(request, Finished(finish.reason))
        elif request.handoff is None:
            error = InternalError("the generation goes on after its first token, but there was no grant")
            self._end(request, Failed(error))
        else:
            request.lifecycle.advance(PrefillPhase.SENDING)
            # The last blocks are copied and checked on the cores that take the first token to the client, so they are
            # sent behind it: whoever reads the events was woken before, and has written it by then.
            first_tokens = tuple((chunk.choice_index, chunk.tokens[-1].token_id) for chunk in first.going_on)
            self._loop.call_soon(request.handoff.complete, computed, first_tokens)

    def _transfer_ended(self, request: PrefillRequest, outcome: TransferOutcome) -> None:
        request.transfer_open = False
        if request.lifecycle.outcome is not None:
            self._free(request)
        elif isinstance(outcome, HandoverFailed):
            refusal = request.handoff.refusal if request.handoff is not None else None
            self._end(request, Failed(refusal or outcome.error))
        else:
            self._handed_over(request, outcome)

    def _handed_over(self, request: PrefillRequest, outcome: HandoverDone) -> None:
        request.lifecycle.finish(Finished(None))
        request.events.put_nowait(
            HandedOver(
                transport=outcome.transport,
                kv_bytes=outcome.kv_bytes,
                transfer_s=request.lifecycle.seconds_between(PrefillPhase.SENDING, PrefillPhase.DONE),
            )
        )
        self._finished += 1
        request.events.put_nowait(None)
        self._free(request)

    def _end(self, request: PrefillRequest, outcome: Outcome) -> None:
        """Let the request end with `outcome`, unless it has ended already, and free what it still holds."""
        if request.lifecycle.outcome is None:
            phase = request.lifecycle.phase
            request.lifecycle.finish(outcome)
            request.events.put_nowait(None)
            self._finished += isinstance(outcome, Finished)
            log_end(Role.PREFILL, request.spec, phase=phase, outcome=outcome)
        self._free(request)

    def _free(self, request: PrefillRequest) -> None:
        """Give back all that the request holds; idempotent. The blocks stay until the transfer has stopped reading."""
        if request.transfer_open and request.handoff is not None:
            self._engine.submit(partial(self._stop, request.key, keep_blocks=True))
            request.handoff.abort()  # comes back through _transfer_ended
        elif request.in_engine:
            request.in_engine = False
            dropped = self._engine.submit(partial(self._stop, request.key, keep_blocks=False))
            dropped.add_done_callback(lambda _: self._call_soon(self._forget, request.key))

    def _forget(self, key: RequestId) -> None:
        del self._requests[key]
        self._count_changed()

    def _count_changed(self) -> None:
        self.loads.changed()
        (self._idle.clear if self._num_unfinished else self._idle.set)()

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
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            finished=self._finished,
            draining=self._door.is_closed,
            unfinished=self._num_unfinished,
        )

    # --- the end -------------------------------------------------------------------------------------

    def begin_drain(self, *, for_good: bool = False, fault: str = "") -> None:
        """Take nothing new from now on."""
        self._door.close(for_good=for_good, fault=fault)
        self.arrivals.end_all()
        self.loads.changed()

    def end_drain(self) -> None:
        """Take new requests again. Raises Draining when the worker is about to end or has a fault."""
        self._door.open()
        self.loads.changed()

    def check_books(self) -> None:
        """Raise IntegrityError unless the pool's books balance."""
        self._parts.pool.check_integrity()

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing is being freed any more."""
        while self._num_unfinished:  # a call that leaves the arrivals may become a request in the same moment
            await self._idle.wait()

    def end_streams(self) -> None:
        """Let the streams end that have no end of their own."""
        self.loads.end()

    def abort_all(self) -> None:
        """End everything that runs."""
        for request in list(self._requests.values()):
            self._end(request, Failed(Draining("this prefill worker was shut down")))

    def close(self) -> int:
        """Join the threads, check the pool's books and give the memory back; returns the number of leaked blocks."""
        self._sender.close()
        self._engine.stop()
        return self._parts.close()
