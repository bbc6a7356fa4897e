"""A prefill worker for a pooling model: a prefill that never decodes.

Calls that wait while a batch is computed go into the next one together, in the order in which they came, up to a
number of tokens; so many small calls cost one forward pass. A call is never split.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import ComputeFailed, Draining, Overloaded, TaskNotSupported, TwinstageError
from twinstage.hosting.door import Door
from twinstage.hosting.load_board import LoadBoard
from twinstage.hosting.sequence_check import check_inputs
from twinstage.telemetry.log import get_logger
from twinstage.types import POOLING_TASKS, PoolingInput, PoolingTask, WorkerDescription, WorkerLoad

logger = get_logger(__name__)

MAX_WAITING_CALLS = 1024


class Encoder(Protocol):
    """A pooling model."""

    def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
    ) -> Sequence[NDArray[np.float32]]:
        """One array of float32 per input, in order.

        EMBED: [dimensions], TOKEN_EMBED: [tokens, dimensions], CLASSIFY: [labels], SCORE: [1].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The results of one call, each an array of little-endian float32 numbers, and where the time went."""

    vectors: tuple[bytes, ...]
    queue_s: float
    compute_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    inputs: list[PoolingInput]
    task: PoolingTask
    normalize: bool
    result: asyncio.Future[Encoded]
    arrived_s: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.inputs)

    def goes_with(self, other: _Call) -> bool:
        """Whether both can be computed in one batch."""
        return (self.task, self.normalize) == (other.task, other.normalize)


class EmbeddingWorker:
    """Encodes batches on a thread of its own. Made and used on one event loop; it has no KV pool."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        description: WorkerDescription,
        tokenizer_bundle: bytes,
        max_tokens_per_batch: int,
    ) -> None:
        self.description = description
        self.tokenizer_bundle = tokenizer_bundle
        self.loads = LoadBoard(self._load)
        self._encoder = encoder
        self._max_tokens_per_batch = max_tokens_per_batch
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._finished = 0
        self._door = Door("prefill worker")

    async def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask | None = None, normalize: bool = True
    ) -> Encoded:
        """Compute `task` (None: the model's own) for all inputs.

        Raises TaskNotSupported, InvalidRequest, Overloaded, Draining or ComputeFailed.
        """
        self._door.enter()
        task = self._checked(task)
        check_inputs(inputs, self.description.model)
        if not inputs:
            return Encoded(vectors=(), queue_s=0.0, compute_s=0.0)
        if len(self._waiting) >= MAX_WAITING_CALLS:
            raise Overloaded(f"{MAX_WAITING_CALLS} encode calls wait already")
        call = _Call(
            inputs=list(inputs),
            task=task,
            normalize=normalize,
            result=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(call)
        self.loads.changed()
        if self._pump is None:
            self._pump = asyncio.create_task(self._compute_waiting())
        try:
            return await call.result
        except asyncio.CancelledError:  # the caller has gone, and with it its place in the queue
            with contextlib.suppress(ValueError):
                self._waiting.remove(call)
            self.loads.changed()
            raise

    def _checked(self, task: PoolingTask | None) -> PoolingTask:
        model = self.description.model
        able = POOLING_TASKS[model.task]
        if task is None:
            return able[0]
        if task not in able:
            words = " and ".join(known.value for known in able)
            raise TaskNotSupported(f"model {model.name} can {words}, not {task.value}")
        return task

    async def _compute_waiting(self) -> None:
        """Compute batches until nothing waits."""
        while batch := self._next_batch():
            self._running = batch
            self.loads.changed()
            await self._compute(batch)
            self._finished += len(batch)
        self._running = []
        self._pump = None
        self.loads.changed()

    def _next_batch(self) -> list[_Call]:
        batch: list[_Call] = []
        tokens = 0
        while self._waiting:
            call = self._waiting[0]
            if call.result.done():
                self._waiting.popleft()
                continue
            fits = tokens + call.num_tokens <= self._max_tokens_per_batch
            if batch and not (fits and call.goes_with(batch[0])):
                break
            batch.append(self._waiting.popleft())
            tokens += call.num_tokens
        return batch

    async def _compute(self, batch: list[_Call]) -> None:
        started_s = time.monotonic()
        inputs = [entry for call in batch for entry in call.inputs]
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._encode, inputs, batch[0].task, batch[0].normalize
            )
        except TwinstageError as error:
            for call in batch:
                if not call.result.done():
                    call.result.set_exception(error)
            return
        compute_s = time.monotonic() - started_s
        start = 0
        for call in batch:
            part = vectors[start : start + len(call.inputs)]
            start += len(call.inputs)
            if not call.result.done():
                call.result.set_result(Encoded(vectors=part, queue_s=started_s - call.arrived_s, compute_s=compute_s))

    def _encode(self, inputs: list[PoolingInput], task: PoolingTask, normalize: bool) -> tuple[bytes, ...]:
        try:
            vectors = self._encoder.encode(inputs, task=task, normalize=normalize)
            if len(vectors) != len(inputs):
                raise ComputeFailed(f"the model gave {len(vectors)} vectors for {len(inputs)} inputs")
            return tuple(np.ascontiguousarray(vector, dtype="<f4").tobytes() for vector in vectors)
        except TwinstageError:
            raise
        except Exception as error:  # the outermost boundary of the compute thread: one batch fails, the worker lives
            logger.exception("encoding failed", inputs=len(inputs))
            raise ComputeFailed(f"computing {len(inputs)} vectors failed: {error}") from error

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(call.num_tokens for call in self._waiting),
            finished=self._finished,
            draining=self._door.is_closed,
            unfinished=len(self._running) + len(self._waiting),
        )

    def reset_prefix_cache(self) -> int:
        """Nothing: an embedding model keeps nothing of its inputs."""
        return 0

    def begin_drain(self, *, for_good: bool = False, fault: str = "") -> None:
        """Take nothing new from now on."""
        self._door.close(for_good=for_good, fault=fault)
        self.loads.changed()

    def end_drain(self) -> None:
        """Take new requests again. Raises Draining when the worker is about to end or has a fault."""
        self._door.open()
        self.loads.changed()

    def check_books(self) -> None:
        """Nothing: there is no KV pool."""

    async def wait_idle(self) -> None:
        """Return when no batch is computed and none waits."""
        if self._pump is not None:
            await asyncio.wait([self._pump])

    def end_streams(self) -> None:
        """Let the streams end that have no end of their own."""
        self.loads.end()

    def abort_all(self) -> None:
        """End everything that runs; a batch that is being computed ends unheard."""
        for call in (*self._waiting, *self._running):
            if not call.result.done():
                call.result.set_exception(Draining("this prefill worker was shut down"))

    def close(self) -> int:
        """Join the thread. Nothing can leak: there is no KV pool."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        return 0
