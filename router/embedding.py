"""Calls of pooling models: a prefill that never decodes.

find the model -> permit -> check and tokenize (in a thread) -> batches of bounded size -> prefill workers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from router.catalog import Work, check_can_do
from router.embedding_admission import AdmittedInput, admit_inputs
from router.encoder import BatchEncoder, EncodingCall, EncodingTally, Vector
from router.failover import FailoverPolicy
from router.gate import Gate
from router.generation import Deadlines, choose_request_id
from router.live import LiveRequests
from router.poison import PoisonBook
from router.quotas import Quotas
from router.trace import RequestTrace
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.errors import Cancelled, DeadlineExceeded, PoisonedRequest
from twinstage.types import Placement, PoolingTask, RawEncodeRequest, RawScoreRequest, Timing, Usage

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """The answer to one call; `vectors` are in input order."""

    request_id: str
    model: str
    vectors: tuple[Vector, ...]
    usage: Usage
    timing: Timing
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall:
    """What a call wants of its model. `admit` checks and tokenizes, in a thread; it raises InvalidRequest."""

    raw: RawEncodeRequest | RawScoreRequest
    model: ServedModel
    num_inputs: int
    admit: Callable[[], list[AdmittedInput]]
    fallback_id: str = ""
    caller: str = ""


def work_of(task: PoolingTask | None) -> Work:
    """What a request that encodes single texts wants; None is the model's own task."""
    if task is None:
        return Work.ENCODE
    return Work.CLASSIFY if task is PoolingTask.CLASSIFY else Work.EMBED


class Embedding:
    """Serves calls of pooling models."""

    def __init__(
        self,
        *,
        workers: WorkerTable,
        executor: Executor,
        gate: Gate,
        live: LiveRequests,
        deadlines: Deadlines,
        policy: FailoverPolicy,
        quotas: Quotas | None = None,
        poison: PoisonBook | None = None,
    ) -> None:
        """`policy` holds for each batch. Without `quotas` callers have none; without `poison` none is remembered."""
        self._poison = PoisonBook(0) if poison is None else poison
        self.quotas = quotas or Quotas()
        self.encoder = BatchEncoder(workers, policy)
        self._workers = workers
        self._executor = executor
        self._gate = gate
        self._live = live
        self._deadlines = deadlines

    def find_model(self, name: str, work: Work) -> ServedModel:
        return self._workers.find_model(name, work=work)

    async def embed(
        self, raw: RawEncodeRequest, *, timeout_s: float | None, caller: str = "", fallback_id: str = ""
    ) -> EmbeddingResult:
        """Embed all inputs of one call. Raises TwinstageError."""
        wanted = list(dict.fromkeys(work_of(parameters.task) for parameters in raw.all_parameters))
        model = self.find_model(raw.model, wanted[0])
        for work in wanted:
            check_can_do(model, work)
        call = PoolingCall(
            raw=raw,
            model=model,
            num_inputs=len(raw.inputs),
            admit=partial(admit_inputs, raw, model),
            fallback_id=fallback_id,
            caller=caller,
        )
        return await self.run(call, timeout_s=timeout_s)

    async def run(self, call: PoolingCall, *, timeout_s: float | None) -> EmbeddingResult:
        """All inputs of one call. Raises TwinstageError."""
        started_s, deadline_s = time.monotonic(), self._deadlines.deadline_s(timeout_s)
        self._poison.check(call.raw, call.model, caller=call.caller)
        request_id = choose_request_id(call.raw.request_id, call.fallback_id, self._live)
        with (
            self.quotas.admitted(call.caller) as account,
            self._live.register(request_id) as live,
            live.trace.failing(),
        ):
            live.trace.model = call.model.name
            try:
                async with live.interruptible(deadline_s):
                    result = await self._run(call, trace=live.trace, started_s=started_s, deadline_s=deadline_s)
                if account is not None:
                    account.use_tokens(result.usage.prompt_tokens)
                return result
            except TimeoutError:
                if live.aborted:
                    raise Cancelled("an operator ended the request") from None
                raise DeadlineExceeded("the request's deadline is over") from None
            except PoisonedRequest:
                self._poison.convict(call.raw, call.model, caller=call.caller)
                raise

    async def _run(
        self, call: PoolingCall, *, trace: RequestTrace, started_s: float, deadline_s: float
    ) -> EmbeddingResult:
        kind = (call.model.name, call.num_inputs.bit_length())
        async with self._gate.permit(deadline_s=deadline_s, caller=call.caller, kind=kind) as waited_s:
            trace.ended_now("queue", waited_s)
            tokenizing_s = time.monotonic()
            inputs = await self.in_thread(call.admit)
            tokenize_s = time.monotonic() - tokenizing_s
            trace.ended_now("tokenize", tokenize_s)
            tally = EncodingTally(trace=trace)
            encoding = EncodingCall(model=call.model, request_id=trace.request_id, deadline_s=deadline_s, tally=tally)
            vectors = await self.encoder.encode(inputs, encoding)
        return EmbeddingResult(
            request_id=trace.request_id,
            model=call.model.name,
            vectors=tuple(vectors),
            usage=Usage(prompt_tokens=sum(vector.prompt_tokens for vector in vectors), completion_tokens=0),
            timing=Timing(
                queue_s=waited_s + tally.queue_s,
                tokenize_s=tokenize_s,
                prefill_s=tally.compute_s,
                total_s=time.monotonic() - started_s,
            ),
            placement=Placement(prefill_worker=",".join(sorted(tally.workers)), retries=tally.retries),
        )

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, off the event loop and beside the prompts of generations."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def admit(self, raw: RawEncodeRequest, model: ServedModel) -> list[AdmittedInput]:
        """Check and tokenize. Raises InvalidRequest."""
        return await self.in_thread(partial(admit_inputs, raw, model))
