"""Embedding calls: a prefill that never decodes.

    find the model -> permit -> check and tokenize (in a thread) -> batches of bounded size -> prefill workers

Batches of one call run on all workers at once, and each is tried again elsewhere when its worker fails.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from router.catalog import find_model
from router.embedding_admission import AdmittedInput, admit_inputs
from router.gate import Gate
from router.generation import Deadlines, choose_request_id
from router.live import LiveRequests
from router.placement import Demand, Refusal, WorkerKey, place
from router.quotas import Quotas
from router.trace import RequestTrace
from router.worker_entry import ServedModel
from router.workers import WorkerTable
from twinstage.errors import Cancelled, DeadlineExceeded, Draining, NoWorker, TwinstageError, WorkerLost
from twinstage.rpc.clients import EncodedBatch
from twinstage.telemetry.log import get_logger
from twinstage.types import Placement, PoolingInput, RawEncodeRequest, Task, Timing, Usage

MAX_BATCH_INPUTS = 64
MAX_BATCH_TOKENS = 4096  # padding included: inputs of similar length go together
CALLS_PER_WORKER = 2  # one computes while the next one waits

logger = get_logger(__name__)
_turns = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One result: little-endian 32-bit floats, and the tokens of the input."""

    data: bytes
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """The answer to one call; `vectors` are in input order."""

    request_id: str
    model: str
    vectors: tuple[Vector, ...]
    usage: Usage
    timing: Timing
    placement: Placement


@dataclass(slots=True)
class EmbeddingTally:
    """Where the time of one call went."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    retries: int = 0
    workers: set[str] = field(default_factory=set)
    trace: RequestTrace | None = None  # none for a stream of inputs

    def add(self, batch: EncodedBatch, worker: str) -> None:
        if self.trace is not None:
            self.trace.ended_now("encode", batch.compute_s, process=worker)
        self.queue_s = max(self.queue_s, batch.queue_s)  # batches wait side by side
        self.compute_s += batch.compute_s
        self.workers.add(worker)


class Embedding:
    """Serves embedding calls."""

    def __init__(
        self,
        *,
        workers: WorkerTable,
        executor: Executor,
        gate: Gate,
        live: LiveRequests,
        deadlines: Deadlines,
        max_attempts: int,
        quotas: Quotas | None = None,
    ) -> None:
        """`max_attempts`: of each batch. Without `quotas` callers have none."""
        self.quotas = quotas or Quotas()
        self._max_attempts = max_attempts
        self._workers = workers
        self._executor = executor
        self._gate = gate
        self._live = live
        self._deadlines = deadlines

    def find_model(self, name: str) -> ServedModel:
        return find_model(self._workers.models, name, task=Task.EMBED)

    async def embed(
        self, raw: RawEncodeRequest, *, timeout_s: float | None, caller: str = "", fallback_id: str = ""
    ) -> EmbeddingResult:
        """Embed all inputs of one call. Raises TwinstageError."""
        started_s, deadline_s = time.monotonic(), self._deadlines.deadline_s(timeout_s)
        model = self.find_model(raw.model)
        request_id = choose_request_id(raw.request_id, fallback_id, self._live)
        with (
            self.quotas.admitted(caller) as account,
            self._live.register(request_id) as live,
            live.trace.failing(),
        ):
            live.trace.model = model.name
            try:
                async with live.interruptible(deadline_s):
                    result = await self._embed(
                        raw,
                        model,
                        caller=caller,
                        trace=live.trace,
                        started_s=started_s,
                        deadline_s=deadline_s,
                    )
                if account is not None:
                    account.use_tokens(result.usage.prompt_tokens)
                return result
            except TimeoutError:
                if live.aborted:
                    raise Cancelled("an operator ended the request") from None
                raise DeadlineExceeded("the request's deadline is over") from None

    async def _embed(
        self,
        raw: RawEncodeRequest,
        model: ServedModel,
        *,
        caller: str,
        trace: RequestTrace,
        started_s: float,
        deadline_s: float,
    ) -> EmbeddingResult:
        kind = (model.name, len(raw.inputs).bit_length())
        async with self._gate.permit(deadline_s=deadline_s, caller=caller, kind=kind) as waited_s:
            trace.ended_now("queue", waited_s)
            tokenizing_s = time.monotonic()
            inputs = await self.admit(raw, model)
            tokenize_s = time.monotonic() - tokenizing_s
            trace.ended_now("tokenize", tokenize_s)
            tally = EmbeddingTally(trace=trace)
            vectors = await self.encode(inputs, model, request_id=trace.request_id, deadline_s=deadline_s, tally=tally)
        return EmbeddingResult(
            request_id=trace.request_id,
            model=model.name,
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

    async def admit(self, raw: RawEncodeRequest, model: ServedModel) -> list[AdmittedInput]:
        """Check and tokenize, off the event loop. Raises InvalidRequest."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, admit_inputs, raw, model)

    async def encode(
        self,
        inputs: Sequence[AdmittedInput],
        model: ServedModel,
        *,
        request_id: str,
        deadline_s: float,
        tally: EmbeddingTally,
    ) -> list[Vector]:
        """The vectors of admitted inputs, in order. Raises the error of the first batch that failed for good."""
        vectors: dict[int, Vector] = {}
        batches = iter(make_batches(inputs))

        async def work_off() -> None:
            for batch in batches:
                encoded = await self._encode_batch(
                    [inputs[index] for index in batch],
                    model,
                    request_id=request_id,
                    deadline_s=deadline_s,
                    tally=tally,
                )
                for index, data in zip(batch, encoded.vectors, strict=True):
                    vectors[index] = finish_vector(data, inputs[index])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CALLS_PER_WORKER * max(1, len(model.prefill))):
                    group.create_task(work_off())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [vectors[index] for index in range(len(inputs))]

    async def _encode_batch(
        self,
        batch: Sequence[AdmittedInput],
        model: ServedModel,
        *,
        request_id: str,
        deadline_s: float,
        tally: EmbeddingTally,
    ) -> EncodedBatch:
        """One batch on one worker, and on others when that one fails."""
        excluded: frozenset[WorkerKey] = frozenset()
        avoided: frozenset[WorkerKey] = frozenset()
        error: TwinstageError | None = None
        num_tokens = sum(len(entry.token_ids) for entry in batch)
        for _ in range(self._max_attempts):
            turn = next(_turns)
            demand = Demand(num_tokens=num_tokens, needs_decode=False)
            pair = place(demand, self._workers.snapshot(model), excluded=excluded, avoided=avoided, turn=turn)
            if isinstance(pair, Refusal):
                raise error or NoWorker(f"{pair.value} for model {model.name!r}; try again")
            try:
                return await self._call(
                    pair.prefill, batch, request_id=f"{request_id}#{turn}", deadline_s=deadline_s, tally=tally
                )
            except TwinstageError as failure:
                if not failure.retryable:
                    raise
                error = failure
                avoided |= {pair.prefill}
                excluded |= {pair.prefill} if isinstance(failure, WorkerLost | Draining) else frozenset()
                tally.retries += 1
                logger.warning("batch failed", worker=pair.prefill.worker_id, error=str(failure))
        assert error is not None
        raise error

    async def _call(
        self,
        key: WorkerKey,
        batch: Sequence[AdmittedInput],
        *,
        request_id: str,
        deadline_s: float,
        tally: EmbeddingTally,
    ) -> EncodedBatch:
        worker = self._workers.life(key)
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline is over")
        with worker.ledger.placed(tokens=sum(len(entry.token_ids) for entry in batch)):
            encoded = await worker.connection.encode(
                request_id,
                [PoolingInput(token_ids=entry.token_ids) for entry in batch],
                normalize=batch[0].worker_normalizes,
                timeout_s=remaining_s,
            )
        tally.add(encoded, worker.description.worker_id)
        return encoded


def make_batches(inputs: Sequence[AdmittedInput]) -> Iterator[list[int]]:
    """Indices of inputs that go to a worker together: alike in length and options, within the bounds, longest first."""
    by_length = sorted(
        range(len(inputs)), key=lambda index: (inputs[index].worker_normalizes, -len(inputs[index].token_ids))
    )
    batch: list[int] = []
    for index in by_length:
        if batch:
            first = inputs[batch[0]]
            is_full = len(batch) >= MAX_BATCH_INPUTS
            is_too_large = len(first.token_ids) * (len(batch) + 1) > MAX_BATCH_TOKENS
            if is_full or is_too_large or first.worker_normalizes != inputs[index].worker_normalizes:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def finish_vector(data: bytes, entry: AdmittedInput) -> Vector:
    """Cut the vector to the dimensions that were asked for, and scale what is left to length 1."""
    if entry.dimensions is not None:
        values = array("f", data[: 4 * entry.dimensions])
        if entry.normalize:
            length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
            values = array("f", (value / length for value in values))
        data = values.tobytes()
    return Vector(data=data, prompt_tokens=len(entry.token_ids))
