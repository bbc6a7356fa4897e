"""One or several choices of a prompt on their way from placement to their last tokens, through as many attempts as it
takes. All are computed by one pair of workers: one prefill, one hand-over.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from router.attempt import AttemptFailed, Receiver, blaming, stand_by, unless_broken
from router.choice import Choice, Delivery
from router.failover import Attempts, Probation, Trial
from router.placement import Demand, Pair, Refusal, place
from router.prefix_memory import PrefixTrail
from router.tally import Tally
from router.worker_entry import ServedModel, WorkerLife
from router.workers import WorkerTable
from twinstage.errors import DeadlineExceeded, InternalError, TwinstageError
from twinstage.lifecycle import CancelledOutcome, Failed, Finished, RouterPhase, router_lifecycle
from twinstage.types import AdmittedRequest, RequestId, Role, SequenceSpec, TokenChunk

_turns = itertools.count()  # placements so far; equals take turns, and attempts have names of their own


class Continuation:
    """The attempts at some choices of one prompt. `choices` are all of them without a token yet, or one."""

    def __init__(
        self,
        request: AdmittedRequest,
        model: ServedModel,
        choices: Sequence[Choice],
        *,
        workers: WorkerTable,
        delivery: Delivery,
        attempts: Attempts,
        probation: Probation,
        tally: Tally,
        tokens_sent: Callable[[], int],
    ) -> None:
        """`tokens_sent` counts the tokens that the client has of the whole call."""
        self.attempts = attempts
        self.tally = tally
        self._request = request
        self._model = model
        self._choices = choices
        self._num_open = len(choices)  # that have not ended
        self._workers = workers
        self._delivery = delivery
        self._probation = probation
        self._tokens_sent = tokens_sent
        self._lifecycle = router_lifecycle()
        self._num_uncached = 0  # tokens that the prefill worker of this attempt probably has to compute
        self._trail = PrefixTrail(
            workers.prefixes, model_fingerprint=model.description.fingerprint, salt=request.spec.cache_salt
        )

    async def run(self) -> None:
        """Serve the choices until they have ended, or have to go on one by one, which `is_done` tells apart.

        Raises TwinstageError; the deadline is the caller's to enforce.
        """
        try:
            await self._attempt_until_done()
        except TwinstageError as error:
            self._lifecycle.finish(Failed(error))
            raise
        except asyncio.CancelledError:
            self._lifecycle.finish(CancelledOutcome())
            raise
        finish = self._choices[0].finish
        self._lifecycle.finish(Finished(finish.reason if finish is not None else None))

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    # --- attempts ---------------------------------------------------------------------------------

    async def _attempt_until_done(self) -> None:
        attempts = self.attempts
        while not attempts.are_over:
            with self._probation.trial(self._model.name, attempts.suspected_on) as trial:
                turn = next(_turns)
                pair = await attempts.placed(
                    partial(self._place, turn),
                    self._workers,
                    model=self._model.name,
                    tokens_sent=self._tokens_sent,
                )
                try:
                    await self._attempt(pair, turn, trial)
                    return
                except AttemptFailed as failed:
                    self.tally.failed(failed.error)
                    num_tokens = sum(len(choice.token_ids) for choice in self._choices)
                    attempts.failed(failed, trial, decode=pair.decode, tokens=num_tokens)
            if num_tokens and len(self._choices) > 1 and not attempts.are_over:
                return  # their tokens differ, and so does what is to be computed again
        assert attempts.error is not None
        raise attempts.error

    def _place(self, turn: int) -> Pair | Refusal:
        limit = self._model.description.max_model_len
        sequence = self._sequence
        num_tokens = len(sequence)
        room = min(self._request.spec.max_tokens - len(self._resumed), limit - num_tokens)
        held = self._trail.held_tokens(sequence)
        # The first token comes from the prefill worker; the decode worker adds its KV when it makes the second.
        demand = Demand(
            num_tokens=num_tokens + 1, num_choices=len(self._choices), needs_decode=room > 1, held_tokens=held
        )
        snapshot = self._workers.snapshot(self._model)
        self.attempts.look(candidate.key for candidate in (*snapshot.prefill, *snapshot.decode))
        pair = place(demand, snapshot, excluded=self.attempts.excluded, avoided=self.attempts.avoided, turn=turn)
        if isinstance(pair, Pair):
            computes_all = self._wanted_scores is not None
            self._num_uncached = num_tokens if computes_all else max(1, num_tokens - held.get(pair.prefill, 0))
        return pair

    @property
    def _resumed(self) -> Sequence[int]:
        """What is computed after the prompt: the tokens so far of the one choice that goes on."""
        return self._choices[0].token_ids if len(self._choices) == 1 else ()

    @property
    def _sequence(self) -> tuple[int, ...]:
        """Prompt and output so far; of several choices, what they have in common."""
        return (*self._request.spec.prompt_token_ids, *self._resumed)

    @property
    def _wanted_scores(self) -> int | None:
        """Alternatives with the log probabilities of the prompt, where the client still lacks them."""
        return None if self._delivery.has_scores else self._request.spec.prompt_logprobs

    async def _attempt(self, pair: Pair, turn: int, trial: Trial) -> None:
        """One try on one pair of workers, from reservation to last token."""
        with blaming(pair.prefill):
            prefill = self._workers.life(pair.prefill)
        decode = None
        if pair.decode is not None:
            with blaming(pair.decode):
                decode = self._workers.life(pair.decode)
        self._lifecycle.advance(RouterPhase.PLACED)
        self.tally.placed(
            prefill_worker=prefill.description.worker_id,
            decode_worker=decode.description.worker_id if decode is not None else "",
            retries=self.attempts.failures,
        )
        spec = self._spec(turn)
        with stand_by(decode, spec, sender=prefill, deadline_s=self._remaining_s) as receiver:
            with self._trail.expected(self._sequence, pair.prefill, pair.decode):
                if receiver is not None:
                    self._lifecycle.advance(RouterPhase.RESERVING)
                    await asyncio.sleep(0)  # the wish for blocks goes out before the next call is made
                await self._prefill(spec, prefill, receiver, trial)
            if receiver is not None and not self.is_done:
                await self._decode(receiver, trial)
        if not self.is_done:
            raise InternalError(f"worker {prefill.key.worker_id} did not end a request of one token")

    def _spec(self, turn: int) -> SequenceSpec:
        """What the workers of this attempt are told."""
        spec = self._request.spec
        first = self._choices[0].index
        return replace(
            spec,
            # A name for each attempt: what is still under way for an earlier one cannot be taken for this one's.
            request_id=RequestId(f"{spec.request_id}#{turn}"),
            resumed_token_ids=tuple(self._resumed),
            num_choices=len(self._choices),
            prompt_logprobs=self._wanted_scores,
            traceparent=self.tally.trace.context.traceparent,
            sampling=replace(spec.sampling, choice_index=first) if first else spec.sampling,
        )

    async def _prefill(self, spec: SequenceSpec, prefill: WorkerLife, receiver: Receiver | None, trial: Trial) -> None:
        """The first tokens, and the hand-over to `receiver` unless they were the last."""
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
                self.tally.reserved(queue_s)
                call.give(grant)
            self._lifecycle.advance(RouterPhase.PREFILLING)
            trial.computing(prefill.key)
            with prefill.ledger.placed(tokens=self._num_uncached):
                first = await unless_broken(call.first_token(), receiver)
            self.tally.prefilled(first)
            trial.progressed(Role.PREFILL)
            self._trail.went_to(sequence, prefill.key)
            self._delivery.send_scores(first.prompt_logprobs)
            self._deliver(first.chunks, receiver)
            if receiver is None or self.is_done:
                self.tally.ended_on_prefill()
                return
            trial.computing(receiver.worker.key)  # from here on its blocks may be complete at any time
            self.tally.handed_over(await unless_broken(call.handed_over(), receiver))
            trial.left(prefill.key)
            self._trail.went_to(sequence, receiver.worker.key)

    async def _decode(self, receiver: Receiver, trial: Trial) -> None:
        """The other tokens, as the decode worker makes them."""
        self._lifecycle.advance(RouterPhase.DECODING)
        while not self.is_done:
            with blaming(receiver.worker.key):
                update = await receiver.subscription.receive()
            trial.progressed(Role.DECODE)
            if update.totals is not None:
                self.tally.decoded(update.totals)
            self._deliver(update.chunks, receiver)
        self._trail.went_to(self._sequence, receiver.worker.key)  # a next turn may begin with the answer

    @property
    def _remaining_s(self) -> float:
        """Time left until the deadline. Raises DeadlineExceeded when there is none."""
        remaining_s = self._request.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline is over")
        return remaining_s

    def _deliver(self, chunks: Sequence[TokenChunk], receiver: Receiver | None) -> None:
        """Turn tokens into text and send it. Choices that end here, and not on the worker, end there as well."""
        ended: list[int] = []
        for chunk in chunks:
            choice = self._choices[chunk.choice_index]
            delta = choice.take(chunk)
            self._delivery.send(choice, delta)
            if delta.finish is not None:
                self._num_open -= 1
                if chunk.finish is None:
                    ended.append(chunk.choice_index)
        if ended and receiver is not None and not self.is_done:  # else the end of the attempt ends them all
            for position in ended:
                receiver.subscription.end_choice(position)
