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
                token depends on the seed, its choice and its position alone, so the continuation is the same. When no
                attempt is left the client gets the error, or StreamBroken if it has tokens already.
Several choices They share the prompt's computation and hand-over; the first tokens come together, and from then on
                each is a sequence of its own. One that ends is ended alone. After a failure those that have tokens
                go on one by one, as their sequences differ.
An early end    A stop string, the time limit, an operator, the deadline, a client that went away: leaving the
                scopes of an attempt cancels the prefill and ends the request on the decode worker. There is no
                other way out of them.

    Flow           one prompt: its choices, its time limit, what it took (here)
    Continuation   choices that are computed together, through attempts (router/continuation.py)
    Attempts       what has failed, and whether, where and when to try again (router/failover.py)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from router.choice import Choice, Delivery
from router.continuation import Continuation
from router.failover import Attempts, FailoverPolicy, Probation
from router.live import LiveRequest
from router.outbox import Outbox, PromptEvent
from router.tally import Report, Tally, report_of
from router.together import run_together
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.telemetry.log import get_logger
from twinstage.text.stream import TextStream
from twinstage.types import AdmittedRequest, Finish, FinishReason

MAX_APART = 8  # choices of one prompt that go on one by one at the same time; each computes the prompt again

logger = get_logger(__name__)


class Flow:
    """One admitted prompt on its way to the last tokens of its choices. Events go to the outbox."""

    def __init__(
        self,
        request: AdmittedRequest,
        model: ServedModel,
        *,
        workers: WorkerTable,
        outbox: Outbox,
        opening: PromptEvent,
        first_index: int = 0,
        live: LiveRequest,
        queue_s: float,
        is_streamed: bool,
        policy: FailoverPolicy,
        probation: Probation,
    ) -> None:
        """`first_index` is that of its first choice among all of the call, `opening` the call's first event."""
        self._request = request
        self._model = model
        self._workers = workers
        self._live = live
        self._outbox = outbox
        self._is_streamed = is_streamed
        self._probation = probation
        prompt_index = first_index // request.spec.num_choices
        self._delivery = Delivery(outbox, opening, first_index=first_index, prompt_index=prompt_index)
        self._choices = [
            Choice(index, TextStream(model.tokenizer, request.text, request.spec.min_tokens))
            for index in range(request.spec.num_choices)
        ]
        attempts = Attempts(policy, request_id=request.spec.request_id)
        self._whole = self._continuation(self._choices, attempts, Tally(request, queue_s, live.trace))
        self._parts: list[Continuation] = []  # of choices that go on apart

    async def run(self) -> Report:
        """Serve the request; what it took. Raises TwinstageError; the deadline is the caller's to enforce."""
        limit_s = self._request.time_limit_s
        try:
            async with self._live.interruptible(None if limit_s is None else time.monotonic() + limit_s):
                await self._whole.run()
                if not self._whole.is_done:
                    await self._go_on_apart()
        except TimeoutError:
            reason = FinishReason.CANCELLED if self._live.aborted else FinishReason.TIME_LIMIT
            self._end_all(Finish(reason=reason))
        num_tokens = sum(choice.text.num_tokens for choice in self._choices)
        reasons = [choice.finish.reason.value for choice in self._choices if choice.finish is not None]
        logger.debug("request finished", reasons=reasons, tokens=num_tokens)
        return report_of([part.tally for part in self._parts] or [self._whole.tally], num_tokens)

    async def _go_on_apart(self) -> None:
        """Each choice that has not ended goes on after its own tokens."""
        failed = self._whole
        self._parts = [
            self._continuation([choice], failed.attempts.continued(), failed.tally.continued())
            for choice in self._choices
            if choice.finish is None
        ]
        await run_together([part.run() for part in self._parts], at_once=MAX_APART)

    def _continuation(self, choices: Sequence[Choice], attempts: Attempts, tally: Tally) -> Continuation:
        return Continuation(
            self._request,
            self._model,
            choices,
            workers=self._workers,
            delivery=self._delivery,
            attempts=attempts,
            probation=self._probation,
            tally=tally,
            tokens_sent=self._tokens_sent,
        )

    def _end_all(self, finish: Finish) -> None:
        """Of every choice that goes on, the client gets what there is."""
        for choice in self._choices:
            if choice.finish is None:
                self._delivery.send(choice, choice.close(finish))

    def _tokens_sent(self) -> int:
        """Tokens that the client has, of all prompts of the call."""
        return self._outbox.num_tokens if self._is_streamed else 0
