"""A prefill worker for a pooling model: a prefill that never decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefill_worker.encoding_queue import Batch, Encoded, EncodingCall, EncodingQueue
from twinstage.errors import ComputeFailed, Draining, TaskNotSupported, TwinstageError
from twinstage.hosting.door import Door
from twinstage.hosting.load_board import LoadBoard
from twinstage.hosting.sequence_check import check_inputs
from twinstage.telemetry.log import get_logger
from twinstage.types import POOLING_TASKS, PoolingInput, PoolingTask, WorkerDescription, WorkerLoad

logger = get_logger(__name__)


class Encoder(Protocol):
    """A pooling model."""

    def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
    ) -> Sequence[NDArray[np.float32]]:
        """One array of float32 per input, in order.

        EMBED: [dimensions], TOKEN_EMBED: [tokens, dimensions], CLASSIFY: [labels], SCORE: [1].
        """


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
        self._queue = EncodingQueue(max_tokens_per_batch=max_tokens_per_batch)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._computing: asyncio.Task[None] | None = None
        self._unfinished = 0  # until their answers are given, which is after the queue has lost them
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
        call = EncodingCall(list(inputs), task, normalize, asyncio.get_running_loop().create_future())
        if self._queue.add(call):
            self._computing = asyncio.create_task(self._compute_waiting())
        self._unfinished += 1
        self.loads.changed()
        try:
            return await call.result
        finally:  # also when the caller has gone
            self._queue.discard(call)
            self._unfinished -= 1
            self.loads.changed()

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
        """Compute batches until nothing waits. Calls that come in the same moment as the first one go with it."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._take_and_compute, loop)

    def _take_and_compute(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the compute thread. The answers are given while the next batch is computed."""
        while (batch := self._queue.take_batch()) is not None:
            loop.call_soon_threadsafe(self.loads.changed)
            started_s = time.monotonic()
            results = self._compute(batch)
            loop.call_soon_threadsafe(self._answer, batch, results, time.monotonic() - started_s)
        loop.call_soon_threadsafe(self.loads.changed)

    def _answer(self, batch: Batch, results: Sequence[bytes | None] | TwinstageError, compute_s: float) -> None:
        calls = [call for call in batch.calls if not call.result.done()]
        if isinstance(results, TwinstageError):
            for call in calls:
                call.fail(results)
        else:
            for (call, index), result in zip(batch.items, results, strict=True):
                call.take(index, result)
        for call in calls:
            call.compute_s += compute_s
            call.answer_if_complete()
        self._finished += sum(call.result.done() for call in calls)

    def _compute(self, batch: Batch) -> Sequence[bytes | None] | TwinstageError:
        """None for an input of which the model makes infinite numbers, or none."""
        inputs, (first, _) = batch.inputs, batch.items[0]
        try:
            vectors = self._encoder.encode(inputs, task=first.task, normalize=first.normalize)
            if len(vectors) != len(inputs):
                raise ComputeFailed(f"the model gave {len(vectors)} vectors for {len(inputs)} inputs")
            return tuple(
                np.ascontiguousarray(vector, dtype="<f4").tobytes() if np.isfinite(vector).all() else None
                for vector in vectors
            )
        except TwinstageError as error:
            return error
        except Exception as error:  # the outermost boundary of the compute thread: one batch fails, the worker lives
            logger.exception("encoding failed", inputs=len(inputs))
            return ComputeFailed(f"computing {len(inputs)} vectors failed: {error}")

    def _load(self) -> WorkerLoad:
        load = self._queue.load()
        return WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            finished=self._finished,
            draining=self._door.is_closed,
            unfinished=self._unfinished,
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
        while self._computing is not None and not self._computing.done():
            await asyncio.wait([self._computing])

    def end_streams(self) -> None:
        """Let the streams end that have no end of their own."""
        self.loads.end()

    def abort_all(self) -> None:
        """End everything that runs; a batch that is being computed ends unheard."""
        for call in self._queue.clear():
            call.fail(Draining("this prefill worker was shut down"))

    def close(self) -> int:
        """Join the thread. Nothing can leak: there is no KV pool."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        return 0
