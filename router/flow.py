"""The flow of one generation request. Start reading here.

  client          router                      prefill worker             decode worker
    │  request      │                               │                          │
    ├──────────────►│ ADMITTED                      │                          │
    │               │ PLACED: a pair is chosen      │                          │
    │               │ RESERVING ───────────────────────── reserve ────────────►│ blocks, or wait while full
    │               │◄─────────────────────────────────── grant ───────────────┤
    │               │ PREFILLING ── prompt, grant ─►│                          │
    │               │                               ├─ KV blocks, per chunk ──►│
    │  first token  │◄──────── first token ─────────┤                          │
    │◄──────────────┤                               ├─ commit ────────────────►│ verified
    │               │◄──────── handed over ─────────┤                          │
    │  deltas       │ DECODING                      │                          │
    │◄──────────────┤◄─────────────────────────────────── tokens ──────────────┤
    │  summary      │ DONE                                                     │ blocks free
    │◄──────────────┤

Shorter ways    One token to generate: no reservation. First token ends it: the reservation is given back.
A worker fails  The request is placed again, as often as `failover` allows, and goes on after the tokens it has: a
                token depends on the seed and its position alone, so the continuation is the same. When no attempt
                is left the client gets the error, or StreamBroken if it has tokens already.
An early end    A stop string, the time limit, an operator, the deadline, a client that went away: leaving the
                scopes of an attempt cancels the prefill and ends the request on the decode worker. There is no
                other way out of them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

from router.attempt import AttemptFailed, Receiver, blaming, stand_by, unless_broken
from router.failover import Attempts, FailoverPolicy, Probation, Trial, refused
from router.live import LiveRequest
from router.outbox import DeltaEvent, FinishEvent, Outbox, PromptEvent, SummaryEvent
from router.placement import Demand, Pair, Refusal, place
from router.prefix_memory import PrefixTrail
from router.tally import Tally
from router.worker_entry import ServedModel, WorkerLife
from router.workers import WorkerTable
from twinstage.errors import (
    DeadlineExceeded,
    InternalError,
    TwinstageError,
)
from twinstage.lifecycle import CancelledOutcome, Failed, Finished, RouterPhase, router_lifecycle
from twinstage.telemetry.log import get_logger
from twinstage.text.stream import TextDelta, TextStream
from twinstage.types import AdmittedRequest, Finish, FinishReason, RequestId, Role, SequenceSpec, TokenChunk

logger = get_logger(__name__)
_turns = itertools.count()  # placements so far; equals take turns, and attempts have names of their own


class Flow:
    """One admitted request on its way to the last token. Events go to the outbox."""

    def __init__(
        self,
        request: AdmittedRequest,
        model: ServedModel,
        *,
        workers: WorkerTable,
        outbox: Outbox,
        live: LiveRequest,
        queue_s: float,
        is_streamed: bool,
        policy: FailoverPolicy,
        probation: Probation,
    ) -> None:
        self._request = request
        self._model = model
        self._workers = workers
        self._outbox = outbox
        self._live = live
        self._is_streamed = is_streamed
        self._attempts = Attempts(policy, request_id=request.spec.request_id)
        self._probation = probation
        self._tally = Tally(request, queue_s)
        self._lifecycle = router_lifecycle()
        self._text = TextStream(model.tokenizer, request.text, request.spec.min_tokens)
        self._token_ids: list[int] = []  # all that workers have produced, in order
        self._prompt_announced = False
        self._num_uncached = 0  # tokens that the prefill worker of this attempt probably has to compute
        self._trail = PrefixTrail(
            workers.prefixes, model_fingerprint=model.description.fingerprint, salt=request.spec.cache_salt
        )

    async def run(self) -> None:
        """Serve the request. Raises TwinstageError; the deadline is the caller's to enforce."""
        try:
            finish = await self._run_until_ended()
        except TwinstageError as error:
            self._lifecycle.finish(Failed(error))
            raise
        except asyncio.CancelledError:
            self._lifecycle.finish(CancelledOutcome())
            raise
        self._lifecycle.finish(Finished(finish.reason))
        self._summarize(finish)
        logger.debug("request finished", reason=finish.reason.value, tokens=self._text.num_tokens)

    async def _run_until_ended(self) -> Finish:
        """Attempts, until the generation ends by itself, by its time limit or by an operator."""
        limit_s = self._request.time_limit_s
        try:
            async with self._live.interruptible(None if limit_s is None else time.monotonic() + limit_s):
                return await self._attempt_until_done()
        except TimeoutError:
            reason = FinishReason.CANCELLED if self._live.aborted else FinishReason.TIME_LIMIT
            delta = self._text.close(Finish(reason=reason))
            self._send(delta)
            assert delta.finish is not None
            return delta.finish

    # --- attempts ---------------------------------------------------------------------------------

    async def _attempt_until_done(self) -> Finish:
        attempts = self._attempts
        while not attempts.are_over:
            with self._probation.trial(self._model.name, attempts.suspected_on) as trial:
                turn = next(_turns)
                pair = await self._placed(turn)
                try:
                    return await self._attempt(pair, turn, trial)
                except AttemptFailed as failed:
                    attempts.failed(failed, trial, decode=pair.decode, tokens=len(self._token_ids))
        assert attempts.error is not None
        raise attempts.giving_up(attempts.error, tokens_sent=self._tokens_sent)

    async def _placed(self, turn: int) -> Pair:
        """A pair of workers, for which a request that has failed waits a moment when there is none."""
        attempts = self._attempts
        until_s = time.monotonic() + attempts.patience_s(tokens_sent=self._tokens_sent)
        has_paused = False
        while True:
            pair = self._place(turn)
            if isinstance(pair, Pair):
                if has_paused or attempts.avoided.isdisjoint((pair.prefill, pair.decode)):
                    return pair
                has_paused = True
                await attempts.pause()
            elif pair is Refusal.TOO_LARGE or not await self._workers.changed(until_s=until_s):
                raise attempts.giving_up(
                    attempts.error or refused(pair, self._model.name), tokens_sent=self._tokens_sent
                )

    def _place(self, turn: int) -> Pair | Refusal:
        limit = self._model.description.max_model_len
        num_tokens = len(self._request.spec.prompt_token_ids) + len(self._token_ids)
        room = min(self._request.spec.max_tokens - len(self._token_ids), limit - num_tokens)
        held = self._trail.held_tokens(self._sequence)
        # The first token comes from the prefill worker; the decode worker adds its KV when it makes the second.
        demand = Demand(num_tokens=num_tokens + 1, needs_decode=room > 1, held_tokens=held)
        snapshot = self._workers.snapshot(self._model)
        self._attempts.look(candidate.key for candidate in (*snapshot.prefill, *snapshot.decode))
        pair = place(demand, snapshot, excluded=self._attempts.excluded, avoided=self._attempts.avoided, turn=turn)
        if isinstance(pair, Pair):
            self._num_uncached = max(1, num_tokens - held.get(pair.prefill, 0))
        return pair

    @property
    def _sequence(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self._request.spec.prompt_token_ids, *self._token_ids)

    @property
    def _tokens_sent(self) -> int:
        """Tokens that the client has."""
        return self._text.num_tokens if self._is_streamed else 0

    async def _attempt(self, pair: Pair, turn: int, trial: Trial) -> Finish:
        """One try on one pair of workers, from reservation to last token."""
        with blaming(pair.prefill):
            prefill = self._workers.life(pair.prefill)
        decode = None
        if pair.decode is not None:
            with blaming(pair.decode):
                decode = self._workers.life(pair.decode)
        self._lifecycle.advance(RouterPhase.PLACED)
        self._tally.placed(
            prefill_worker=prefill.description.worker_id,
            decode_worker=decode.description.worker_id if decode is not None else "",
            retries=self._attempts.failures,
        )
        # A name of its own for each attempt: what is still under way for an earlier one cannot be taken for this one's.
        spec = replace(
            self._request.spec,
            request_id=RequestId(f"{self._request.spec.request_id}#{turn}"),
            resumed_token_ids=tuple(self._token_ids),
        )
        with stand_by(decode, spec, sender=prefill, deadline_s=self._remaining_s) as receiver:
            with self._trail.expected(self._sequence, pair.prefill, pair.decode):
                if receiver is not None:
                    self._lifecycle.advance(RouterPhase.RESERVING)
                    await asyncio.sleep(0)  # the wish for blocks goes out before the next call is made
                finish = await self._prefill(spec, prefill, receiver, trial)
            if finish is None and receiver is not None:
                finish = await self._decode(receiver, trial)
        if finish is None:
            raise InternalError(f"worker {prefill.key.worker_id} did not end a request of one token")
        return finish

    async def _prefill(
        self, spec: SequenceSpec, prefill: WorkerLife, receiver: Receiver | None, trial: Trial
    ) -> Finish | None:
        """The first token, and the hand-over to `receiver`. None when the generation goes on there."""
        sequence = self._sequence
        # The call is set up while the decode worker reserves; it is the grant that starts the prefill, or the
        # call itself when none is needed.
        started = prefill.connection.prefill(
            spec, None, timeout_s=self._remaining_s, grant_follows=receiver is not None
        )
        if receiver is None:
            await trial.turn()
        with blaming(prefill.key), started as call:
            if receiver is not None:
                async with call.unless_over():  # a worker that is lost while the request waits has not died of it
                    grant, queue_s = await receiver.granted()
                    await unless_broken(trial.turn(), receiver)
                self._tally.reserved(queue_s)
                call.give(grant)
            self._lifecycle.advance(RouterPhase.PREFILLING)
            trial.computing(prefill.key)
            with prefill.ledger.placed(tokens=self._num_uncached):
                first = await unless_broken(call.first_token(), receiver)
            self._tally.prefilled(first)
            trial.progressed(Role.PREFILL)
            self._trail.went_to(sequence, prefill.key)
            finish = self._deliver(first.chunk)
            if finish is not None or receiver is None:
                self._tally.ended_on_prefill()
                return finish
            trial.computing(receiver.worker.key)  # from here on its blocks may be complete at any time
            self._tally.handed_over(await unless_broken(call.handed_over(), receiver))
            trial.left(prefill.key)
            self._trail.went_to(sequence, receiver.worker.key)
            return None

    async def _decode(self, receiver: Receiver, trial: Trial) -> Finish:
        """The other tokens, as the decode worker makes them."""
        self._lifecycle.advance(RouterPhase.DECODING)
        while True:
            with blaming(receiver.worker.key):
                update = await receiver.subscription.receive()
            trial.progressed(Role.DECODE)
            if update.totals is not None:
                self._tally.decoded(update.totals)
            finish = self._deliver(
                TokenChunk(request_id=receiver.subscription.request_id, tokens=update.tokens, finish=update.finish)
            )
            if finish is not None:
                self._trail.went_to(self._sequence, receiver.worker.key)  # a next turn may begin with the answer
                return finish

    @property
    def _remaining_s(self) -> float:
        """Time left until the deadline. Raises DeadlineExceeded when there is none."""
        remaining_s = self._request.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline is over")
        return remaining_s

    # --- what the client gets ---------------------------------------------------------------------

    def _deliver(self, chunk: TokenChunk) -> Finish | None:
        """Turn tokens into text and send it. Returns how the generation ended, if it did."""
        self._token_ids += [token.token_id for token in chunk.tokens]
        delta = self._text.push(chunk)
        self._send(delta)
        return delta.finish

    def _send(self, delta: TextDelta) -> None:
        if not self._prompt_announced:
            # Not before the first token: a stream that has begun can no longer be retried by the client's gRPC.
            self._prompt_announced = True
            self._outbox.put(
                PromptEvent(
                    request_id=self._live.request_id,
                    model=self._model.name,
                    prompt_tokens=len(self._request.spec.prompt_token_ids),
                    answer_format=self._request.answer_format,
                )
            )
        if delta.text or delta.tokens:
            self._outbox.put(DeltaEvent(index=0, text=delta.text, tokens=delta.tokens))

    def _summarize(self, finish: Finish) -> None:
        self._outbox.put(FinishEvent(index=0, finish=finish))
        self._outbox.put(
            SummaryEvent(
                usage=self._tally.usage(self._text.num_tokens),
                timing=self._tally.timing(),
                placement=self._tally.placement,
            )
        )
