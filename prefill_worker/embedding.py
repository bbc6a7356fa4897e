"""A prefill worker for a pooling model: a prefill that never decodes.

What waits is computed in batches of a bounded number of tokens. A batch takes one input of each waiting call in turn,
so a call may be spread over several batches and a small call is not held up by a large one before it.
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


@dataclass(slots=True, eq=False)
class _Call:
    """One call; `left` are the indices of the inputs that no batch has taken yet, the longest first."""

    inputs: Sequence[PoolingInput]
    task: PoolingTask
    normalize: bool
    result: asyncio.Future[Encoded]
    left: deque[int] = field(init=False)
    results: dict[int, bytes] = field(default_factory=dict)
    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        by_length = sorted(range(len(self.inputs)), key=lambda index: -len(self.inputs[index].token_ids))
        self.left = deque(by_length)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(self.inputs[index].token_ids) for index in self.left)

    def goes_with(self, other: _Call) -> bool:
        """Whether both can be computed in one batch."""
        return (self.task, self.normalize) == (other.task, other.normalize)

    def answer_if_complete(self) -> None:
        if len(self.results) == len(self.inputs) and not self.result.done():
            assert self.started_s is not None
            vectors = tuple(self.results[index] for index in range(len(self.inputs)))
            queue_s = self.started_s - self.arrived_s
            self.result.set_result(Encoded(vectors=vectors, queue_s=queue_s, compute_s=self.compute_s))


@dataclass(slots=True, eq=False)
class _Batch:
    """Inputs that are computed together, each with its call."""

    items: list[tuple[_Call, int]] = field(default_factory=list)
    tokens: int = 0

    @property
    def calls(self) -> list[_Call]:
        return list(dict.fromkeys(call for call, _ in self.items))

    def take(self, call: _Call, max_tokens: int) -> bool:
        """Take the next input of a call if it fits; the first one always does."""
        size = len(call.inputs[call.left[0]].token_ids)
        if self.items and (self.tokens + size > max_tokens or not call.goes_with(self.items[0][0])):
            return False
        self.items.append((call, call.left.popleft()))
        self.tokens += size
        return True


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
        call = _Call(list(inputs), task, normalize, asyncio.get_running_loop().create_future())
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
        while (batch := self._next_batch()).items:
            self._running = batch.calls
            self.loads.changed()
            await self._compute(batch)
            self._finished += sum(call.result.done() for call in self._running)
        self._running = []
        self._pump = None
        self.loads.changed()

    def _next_batch(self) -> _Batch:
        """One input of each call in turn, until nothing more fits. Those who got less come first the next time."""
        batch = _Batch()
        self._waiting = deque(call for call in self._waiting if not call.result.done())
        taken = True
        while taken:
            taken, passed, served = False, deque[_Call](), []
            for call in self._waiting:
                if not batch.take(call, self._max_tokens_per_batch):
                    passed.append(call)
                    continue
                taken = True
                if call.left:
                    served.append(call)
            self._waiting = passed + deque(served)
        return batch

    async def _compute(self, batch: _Batch) -> None:
        started_s = time.monotonic()
        for call in batch.calls:
            call.started_s = call.started_s or started_s
        inputs = [call.inputs[index] for call, index in batch.items]
        first = batch.items[0][0]
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._encode, inputs, first.task, first.normalize
            )
        except TwinstageError as error:
            for call in batch.calls:
                if not call.result.done():
                    call.result.set_exception(error)
            return
        for (call, index), result in zip(batch.items, results, strict=True):
            if result is not None:
                call.results[index] = result
            elif not call.result.done():  # its neighbours are not to blame
                call.result.set_exception(ComputeFailed("the model's numbers for an input are not finite"))
        for call in batch.calls:
            call.compute_s += time.monotonic() - started_s
            call.answer_if_complete()

    def _encode(self, inputs: list[PoolingInput], task: PoolingTask, normalize: bool) -> tuple[bytes | None, ...]:
        """None for an input of which the model makes infinite numbers, or none."""
        try:
            vectors = self._encoder.encode(inputs, task=task, normalize=normalize)
            if len(vectors) != len(inputs):
                raise ComputeFailed(f"the model gave {len(vectors)} vectors for {len(inputs)} inputs")
            return tuple(
                np.ascontiguousarray(vector, dtype="<f4").tobytes() if np.isfinite(vector).all() else None
                for vector in vectors
            )
        except TwinstageError:
            raise
        except Exception as error:  # the outermost boundary of the compute thread: one batch fails, the worker lives
            logger.exception("encoding failed", inputs=len(inputs))
            raise ComputeFailed(f"computing {len(inputs)} vectors failed: {error}") from error

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(call.waiting_tokens for call in self._waiting),
            finished=self._finished,
            draining=self._door.is_closed,
            unfinished=len({*self._running, *self._waiting}),
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
