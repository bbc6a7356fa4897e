"""Admitted inputs become vectors: in batches of bounded size, on all workers of the model at once.

A batch is tried again when its worker fails, by the rules of `failover`: it is a request of one leg.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.attempt import AttemptFailed, blaming
from router.embedding_admission import AdmittedInput
from router.failover import Attempts, FailoverPolicy, Probation, Trial
from router.placement import Demand, Pair, Refusal, place
from router.together import run_together
from router.trace import RequestTrace
from router.worker_entry import ServedModel, WorkerLife
from router.workers import WorkerTable
from twinstage.errors import DeadlineExceeded, WorkerLost
from twinstage.rpc.clients import EncodedBatch
from twinstage.types import PoolingInput, PoolingTask, RequestId

MAX_BATCH_INPUTS = 64
MAX_BATCH_TOKENS = 4096  # padding included: inputs of similar length go together
MAX_TOKEN_VECTORS = 1024  # of a batch: 16 MiB with 4,096 numbers each
LARGE_RESULT = 64  # vectors; cutting more of them would hold up the event loop
CALLS_PER_WORKER = 2  # one computes while the next one waits

_turns = itertools.count()
_SCORE = struct.Struct("<f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One result: little-endian 32-bit floats, and the tokens of the input.

    `rows` vectors follow one another: one per token where that is the task, else 1. A score is one number.
    """

    data: bytes
    prompt_tokens: int
    rows: int = 1


@dataclass(slots=True)
class EncodingTally:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingCall:
    """Whose inputs are encoded, and until when (monotonic). Those of a stream cannot be sent to another router."""

    model: ServedModel
    request_id: str
    deadline_s: float
    tally: EncodingTally = field(default_factory=EncodingTally)
    is_stream: bool = False


class BatchEncoder:
    """Has batches of inputs computed. Belongs to one event loop."""

    def __init__(self, workers: WorkerTable, policy: FailoverPolicy) -> None:
        """`policy` holds for each batch."""
        self._workers = workers
        self._policy = policy
        self._probation = Probation()

    async def encode(self, inputs: Sequence[AdmittedInput], call: EncodingCall) -> list[Vector]:
        """The vectors of admitted inputs, in order. Raises the error of the first batch that failed for good."""
        vectors: dict[int, Vector] = {}
        batches = iter(make_batches(inputs))

        async def work_off() -> None:
            for batch in batches:
                encoded = await self._encode_batch([inputs[index] for index in batch], call)
                for index, data in zip(batch, encoded.vectors or map(_SCORE.pack, encoded.scores), strict=True):
                    is_large = inputs[index].dimensions is not None and inputs[index].num_vectors > LARGE_RESULT
                    finish = partial(finish_vector, data, inputs[index])
                    vectors[index] = await asyncio.to_thread(finish) if is_large else finish()

        lanes = CALLS_PER_WORKER * max(1, len(call.model.prefill))
        await run_together([work_off() for _ in range(lanes)], at_once=lanes)
        return [vectors[index] for index in range(len(inputs))]

    async def _encode_batch(self, batch: Sequence[AdmittedInput], call: EncodingCall) -> EncodedBatch:
        """One batch on one worker, and on others or the same one again when that one fails."""
        attempts = Attempts(self._policy, request_id=RequestId(call.request_id))
        while not attempts.are_over:
            with self._probation.trial(call.model.name, attempts.suspected_on) as trial:
                turn = next(_turns)
                pair = await attempts.placed(
                    partial(self._place, batch, call.model, attempts, turn),
                    self._workers,
                    model=call.model.name,
                    tokens_sent=lambda: 0,
                    is_bound=call.is_stream,
                )
                await trial.turn()
                try:
                    worker = self._workers.life(pair.prefill)
                except WorkerLost:
                    continue  # lost while this batch waited for its turn
                try:
                    return await self._attempt(worker, batch, call, trial, name=f"{call.request_id}#{turn}")
                except AttemptFailed as failed:
                    call.tally.retries += 1
                    attempts.failed(failed, trial, decode=None, tokens=0)
        assert attempts.error is not None
        raise attempts.error

    def _place(
        self, batch: Sequence[AdmittedInput], model: ServedModel, attempts: Attempts, turn: int
    ) -> Pair | Refusal:
        snapshot = self._workers.snapshot(model)
        attempts.look(candidate.key for candidate in snapshot.prefill)
        demand = Demand(num_tokens=sum(len(entry.token_ids) for entry in batch), needs_decode=False)
        return place(demand, snapshot, excluded=attempts.excluded, avoided=attempts.avoided, turn=turn)

    async def _attempt(
        self, worker: WorkerLife, batch: Sequence[AdmittedInput], call: EncodingCall, trial: Trial, *, name: str
    ) -> EncodedBatch:
        """One try on one worker. Raises AttemptFailed when another one may do better."""
        remaining_s = call.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline is over")
        tokens = sum(len(entry.token_ids) for entry in batch)
        with blaming(worker.key), worker.ledger.placed(tokens=tokens):
            trial.computing(worker.key)
            encoded = await worker.connection.encode(
                name,
                [
                    PoolingInput(
                        token_ids=entry.token_ids,
                        token_type_ids=entry.token_type_ids,
                        prompt_tokens=min(entry.unpooled_tokens, len(entry.token_ids) - 1),
                    )
                    for entry in batch
                ],
                task=batch[0].task,
                normalize=batch[0].worker_normalizes,
                timeout_s=remaining_s,
            )
        call.tally.add(encoded, worker.description.worker_id)
        return encoded


def make_batches(inputs: Sequence[AdmittedInput]) -> Iterator[list[int]]:
    """Indices of inputs that go to a worker together: alike in length and options, within the bounds, longest first."""

    def kind(index: int) -> tuple[str, bool]:
        return inputs[index].task.value, inputs[index].worker_normalizes

    batch: list[int] = []
    for index in sorted(range(len(inputs)), key=lambda index: (kind(index), -len(inputs[index].token_ids))):
        if batch:
            is_full = len(batch) >= MAX_BATCH_INPUTS
            most_tokens = MAX_TOKEN_VECTORS if inputs[index].task is PoolingTask.TOKEN_EMBED else MAX_BATCH_TOKENS
            is_too_large = len(inputs[batch[0]].token_ids) * (len(batch) + 1) > most_tokens
            if is_full or is_too_large or kind(batch[0]) != kind(index):
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def finish_vector(data: bytes, entry: AdmittedInput) -> Vector:
    """Cut each vector to the dimensions that were asked for, and scale what is left to length 1."""
    rows = entry.num_vectors
    if entry.dimensions is not None:
        row_bytes = len(data) // rows
        starts = range(0, len(data), row_bytes)
        data = b"".join(_cut(data[start : start + 4 * entry.dimensions], entry.normalize) for start in starts)
    return Vector(data=data, prompt_tokens=len(entry.token_ids), rows=rows)


def _cut(data: bytes, normalize: bool) -> bytes:
    if not normalize:
        return data
    values = array("f", data)
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return array("f", (value / length for value in values)).tobytes()
