"""Generation calls: from what a client sent to the outbox from which it is answered.

    name it -> find the model -> check the fields -> permit -> tokenize -> flow

Everything after the checks runs in a task of its own, under the request's deadline. Leaving `open` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from router.admission import Admission, check_fields, kind_of
from router.admission.defaults import num_continuations
from router.admission.forced_calls import blame_tools, must_call, with_forced_calls
from router.catalog import Work
from router.failover import FailoverPolicy, Probation, broken_off
from router.flow import Flow
from router.gate import Gate
from router.limits import MAX_PRIORITY
from router.live import LiveRequest, LiveRequests
from router.outbox import DeltaEvent, Event, Outbox, PromptEvent, SummaryEvent
from router.poison import PoisonBook
from router.prompt_scores import check_unary_size
from router.quotas import Account, Quotas
from router.tally import report_of_batch
from router.together import run_together
from router.trace import reason_of
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.errors import Cancelled, DeadlineExceeded, InvalidRequest, PoisonedRequest, Unavailable
from twinstage.grammar.checking import GrammarChecks
from twinstage.telemetry.log import get_logger
from twinstage.types import AdmittedRequest, RawGenerationRequest
from twinstage.types.constraints import OutputConstraint

MAX_PROMPTS_AT_ONCE = 32  # of one batch; the others wait
CLIENT_IS_EARLIER_S = 0.1  # at most, with a deadline that it has set itself and at which it leaves

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a request may take: what its client says, within `longest_s`, or `default_s` when it says nothing."""

    default_s: float
    longest_s: float

    def deadline_s(self, asked_s: float | None) -> float:
        """The deadline on the loop's clock."""
        return time.monotonic() + min(self.default_s if asked_s is None else asked_s, self.longest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A call in progress."""

    request_id: str
    model: ServedModel
    outbox: Outbox


class Generation:
    """Opens generation calls."""

    def __init__(
        self,
        *,
        workers: WorkerTable,
        admission: Admission,
        gate: Gate,
        live: LiveRequests,
        deadlines: Deadlines,
        policy: FailoverPolicy,
        max_priority: int = MAX_PRIORITY,
        quotas: Quotas | None = None,
        metrics: RequestMetrics | None = None,
        grammars: GrammarChecks | None = None,
        poison: PoisonBook | None = None,
    ) -> None:
        """`max_priority`: levels that a priority counts at most, up or down, here and at the workers.

        Without `quotas` callers have none, without `metrics` nothing is measured, and without `poison` nothing is
        remembered of poisoned requests.
        """
        self._poison = PoisonBook(0) if poison is None else poison
        self._quotas = quotas or Quotas()
        self._metrics = metrics
        self._workers = workers
        self._admission = admission
        self._gate = gate
        self._live = live
        self._deadlines = deadlines
        self._policy = policy
        self._max_priority = max_priority
        self._grammars = grammars or GrammarChecks()
        self.probation = Probation()

    @contextlib.asynccontextmanager
    async def open(
        self,
        raw: RawGenerationRequest,
        *,
        timeout_s: float | None,
        is_streamed: bool,
        caller: str = "",
        fallback_id: str = "",
    ) -> AsyncIterator[OpenCall]:
        """Start a request; its events, or its error, come from the outbox.

        `caller` shares the router with others; `fallback_id` names the request when its caller did not. Raises what
        admission refuses.
        """
        arrived_s, deadline_s = time.monotonic(), self._deadlines.deadline_s(timeout_s)
        model = self._workers.find_model(raw.model, work=Work.GENERATE)
        check_fields(raw, model, self._admission.parsers)
        raw = with_forced_calls(raw)
        raw = replace(raw, priority=max(-self._max_priority, min(raw.priority, self._max_priority)))
        self._poison.check(raw, model, caller=caller)
        with self._quotas.admitted(caller) as account:  # first, as to compile a grammar is work, too
            constraint = await self._constraint(raw, model, deadline_s)
            request_id = choose_request_id(raw.request_id, fallback_id, self._live)
            with self._live.register(request_id) as live:
                live.trace.model = model.name
                call = _Call(
                    raw=raw,
                    caller=caller,
                    model=model,
                    live=live,
                    arrived_s=arrived_s,
                    deadline_s=deadline_s,
                    is_streamed=is_streamed,
                    constraint=constraint,
                )
                outbox = Outbox(*self._watchers(model, arrived_s, account))
                async with self._running(call, outbox):
                    yield OpenCall(request_id=live.request_id, model=model, outbox=outbox)

    @contextlib.asynccontextmanager
    async def _running(self, call: _Call, outbox: Outbox) -> AsyncIterator[None]:
        """The request runs while the block does, at most."""
        task = asyncio.create_task(self._run(call, outbox), name=f"request {call.live.request_id}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _watchers(
        self, model: ServedModel, arrived_s: float, account: Account | None
    ) -> Iterator[Callable[[Event], None]]:
        if self._metrics is not None:
            yield self._metrics.watch(model.name, arrived_s)
        if account is not None:
            yield partial(_charge, account)

    async def _constraint(
        self, raw: RawGenerationRequest, model: ServedModel, deadline_s: float
    ) -> OutputConstraint | None:
        """What the output obeys, judged before anything is queued. Raises InvalidRequest, Overloaded."""
        if raw.structured_output is None:
            return None
        try:
            async with asyncio.timeout_at(deadline_s):
                return await self._grammars.judge(raw.structured_output, model.tokenizer)
        except InvalidRequest as error:
            raise (blame_tools(error) if must_call(raw.prompt) else error) from None
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline is over") from None

    async def _run(self, call: _Call, outbox: Outbox) -> None:
        """Run one request; everything it raises goes to its client by way of the outbox."""
        try:
            try:
                async with asyncio.timeout_at(call.deadline_s):
                    await self._admit_and_flow(call, outbox)
            except TimeoutError:
                raise DeadlineExceeded("the request's deadline is over") from None
        except asyncio.CancelledError:  # by `open`, whose reader has gone; or by a bug, whose reader must not wait
            is_late = time.monotonic() > call.deadline_s - CLIENT_IS_EARLIER_S
            call.live.trace.error_reason = (DeadlineExceeded if is_late else Cancelled).reason
            outbox.close(Unavailable("the router stopped working on the request; try again"))
            raise
        except Exception as raised:  # the outermost frame of this task; the call's handler re-raises it
            error = broken_off(raised, tokens_sent=outbox.num_tokens if call.is_streamed else 0)
            call.live.trace.error_reason = reason_of(error)
            if isinstance(error, PoisonedRequest):
                self._poison.convict(call.raw, call.model, caller=call.caller)
            outbox.close(error)
        else:
            outbox.close()

    async def _admit_and_flow(self, call: _Call, outbox: Outbox) -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with call.live.interruptible():
                    permit = self._gate.permit(
                        deadline_s=call.deadline_s,
                        caller=call.caller,
                        priority=call.raw.priority,
                        kind=kind_of(call.raw, call.model),
                        size=num_at_once(call.raw),
                    )
                    queue_s = await stack.enter_async_context(permit)
                    call.live.trace.ended_now("queue", queue_s)
                    requests = await self._admit(call)
                    call.live.trace.ended_now("tokenize", sum(request.tokenize_s for request in requests))
            except TimeoutError:
                if not call.live.aborted:
                    raise
                raise Cancelled("an operator ended the request before it was placed") from None
            flows = self._flows(call, requests, outbox, queue_s)
            reports = await run_together([flow.run() for flow in flows], at_once=MAX_PROMPTS_AT_ONCE)
            report = report_of_batch(reports)
            outbox.put(SummaryEvent(usage=report.usage, timing=report.timing, placement=report.placement))

    def _flows(self, call: _Call, requests: Sequence[AdmittedRequest], outbox: Outbox, queue_s: float) -> list[Flow]:
        """One for each prompt."""
        opening = PromptEvent(
            request_id=call.live.request_id,
            model=call.model.name,
            prompt_tokens=sum(len(request.spec.prompt_token_ids) for request in requests),
            answer_format=requests[0].answer_format,
        )
        return [
            Flow(
                request,
                call.model,
                workers=self._workers,
                outbox=outbox,
                opening=opening,
                first_index=position * request.spec.num_choices,
                live=call.live,
                queue_s=queue_s,
                is_streamed=call.is_streamed,
                policy=self._policy,
                probation=self.probation,
            )
            for position, request in enumerate(requests)
        ]

    async def _admit(self, call: _Call) -> list[AdmittedRequest]:
        requests = await self._admission.admit(
            call.raw,
            call.model,
            request_id=call.live.request_id,
            arrived_s=call.arrived_s,
            deadline_s=call.deadline_s,
            constraint=call.constraint,
        )
        if not call.is_streamed:
            check_unary_size([request.spec for request in requests])
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    raw: RawGenerationRequest
    caller: str
    model: ServedModel
    live: LiveRequest
    arrived_s: float
    deadline_s: float
    is_streamed: bool
    constraint: OutputConstraint | None


class RequestMetrics(Protocol):
    """Who measures requests."""

    def watch(self, model: str, arrived_s: float) -> Callable[[Event], None]:
        """What is told of each event of a request to `model` that arrived then."""


def num_at_once(raw: RawGenerationRequest) -> int:
    """How many continuations of a call are computed at the same time."""
    return num_continuations(raw, most_prompts=MAX_PROMPTS_AT_ONCE)


def _charge(account: Account, event: Event) -> None:
    """Count the tokens of prompt and answer as the client gets them."""
    if isinstance(event, PromptEvent):
        account.use_tokens(event.prompt_tokens)
    elif isinstance(event, DeltaEvent):
        account.use_tokens(len(event.tokens))


def choose_request_id(asked: str, fallback: str, live: LiveRequests) -> str:
    """The caller's id (`register` sees to it that it is free), else the fallback if it is free, else a new one."""
    if asked:
        return asked
    return fallback if fallback and fallback not in live else uuid.uuid4().hex
