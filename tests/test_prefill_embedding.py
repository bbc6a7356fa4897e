"""How a prefill worker for a pooling model batches what waits, answers each call for itself, and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from prefill_worker.embedding import EmbeddingWorker
from twinstage.errors import ComputeFailed, Draining, InvalidRequest, Overloaded
from twinstage.types import PoolingInput, PoolingTask, Task
from worker_parts import VOCABULARY_SIZE, description


@dataclass(eq=False)
class StandInEncoder:
    """The vector of an input is its sum and its length. `gate` holds a batch back."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[tuple[int, bool]] = field(default_factory=list)
    error: Exception | None = None

    def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
    ) -> Sequence[NDArray[np.float32]]:
        token_ids = [entry.token_ids for entry in inputs]
        self.batches.append((len(token_ids), normalize))
        self.entered.set()
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return [np.array([sum(item), len(item)], dtype=np.float32) for item in token_ids]


@asynccontextmanager
async def _embedding(encoder: StandInEncoder, *, max_tokens: int = 64) -> AsyncIterator[EmbeddingWorker]:
    worker = EmbeddingWorker(
        encoder,
        description=description(num_blocks=0, block_size=0, task=Task.EMBED),
        tokenizer_bundle=b"bundle",
        max_tokens_per_batch=max_tokens,
    )
    try:
        yield worker
    finally:
        encoder.gate.set()
        await worker.wait_idle()
        assert await asyncio.to_thread(worker.close) == 0


def _pooling(inputs: Sequence[Sequence[int]]) -> list[PoolingInput]:
    return [PoolingInput(token_ids=token_ids) for token_ids in inputs]


def _vectors(vectors: Sequence[bytes]) -> list[list[float]]:
    return [np.frombuffer(vector, dtype="<f4").tolist() for vector in vectors]


async def test_calls_that_wait_are_computed_together_and_answered_apart() -> None:
    encoder = StandInEncoder()
    async with _embedding(encoder) as worker:
        first = asyncio.ensure_future(worker.encode(_pooling([[1, 2]]), normalize=True))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        others = [asyncio.ensure_future(worker.encode(_pooling([[n], [n, n]]), normalize=True)) for n in range(1, 5)]
        different = asyncio.ensure_future(worker.encode(_pooling([[9]]), normalize=False))
        await asyncio.sleep(0)
        load = await anext(worker.loads.watch(1.0))
        assert (load.running, load.waiting) == (1, 5)
        encoder.gate.set()
        assert _vectors((await first).vectors) == [[3.0, 2.0]]
        for n, call in enumerate(others, start=1):
            assert _vectors((await call).vectors) == [[float(n), 1.0], [2.0 * n, 2.0]]
        assert _vectors((await different).vectors) == [[9.0, 1.0]]
        assert encoder.batches == [(1, True), (8, True), (1, False)]


async def test_a_batch_has_a_limit_and_a_large_call_goes_alone() -> None:
    encoder = StandInEncoder()
    async with _embedding(encoder, max_tokens=4) as worker:
        calls = [
            asyncio.ensure_future(worker.encode(_pooling(inputs), normalize=True))
            for inputs in ([[1]], [[1, 2], [3]], [[1] * 9], [[2, 2]])
        ]
        await asyncio.sleep(0)
        encoder.gate.set()
        await asyncio.gather(*calls)
        assert [size for size, _ in encoder.batches] == [3, 1, 1]


async def test_a_small_call_does_not_wait_for_all_of_a_large_one_before_it() -> None:
    encoder = StandInEncoder()
    async with _embedding(encoder, max_tokens=8) as worker:
        finished: list[str] = []

        async def call(name: str, inputs: list[list[int]]) -> None:
            encoded = await worker.encode(_pooling(inputs), normalize=True)
            assert _vectors(encoded.vectors) == [[float(sum(item)), float(len(item))] for item in inputs]
            finished.append(name)

        large = asyncio.ensure_future(call("large", [[n] * (1 + n % 4) for n in range(40)]))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        others = [asyncio.ensure_future(call(*other)) for other in (("small", [[7, 7]]), ("middle", [[1, 2], [3]]))]
        await asyncio.sleep(0)
        encoder.gate.set()
        await asyncio.gather(large, *others)
        assert finished == ["small", "middle", "large"]
        assert max(size for size, _ in encoder.batches) <= 8


async def test_an_answer_is_given_while_the_next_batch_is_computed() -> None:
    class SecondHeldBack(StandInEncoder):
        def encode(
            self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
        ) -> Sequence[NDArray[np.float32]]:
            if not self.batches:
                self.batches.append((len(inputs), normalize))
                return [np.array([1.0], dtype=np.float32) for _ in inputs]
            return super().encode(inputs, task=task, normalize=normalize)

    encoder = SecondHeldBack()
    async with _embedding(encoder, max_tokens=2) as worker, asyncio.timeout(10):
        first, second = (asyncio.ensure_future(worker.encode(_pooling([[n, n]]))) for n in (1, 2))
        assert _vectors((await first).vectors) == [[1.0]]
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        assert not second.done()
        load = await anext(worker.loads.watch(1.0))
        assert (load.running, load.waiting, load.unfinished, load.finished) == (1, 0, 1, 1)
        encoder.gate.set()
        assert _vectors((await second).vectors) == [[4.0, 2.0]]
        await worker.wait_idle()
        load = await anext(worker.loads.watch(1.0))
        assert (load.running, load.waiting, load.unfinished, load.finished) == (0, 0, 0, 2)


async def test_all_calls_end_with_the_worker_whether_they_run_or_wait() -> None:
    encoder = StandInEncoder()
    async with _embedding(encoder, max_tokens=2) as worker, asyncio.timeout(10):
        calls = [asyncio.ensure_future(worker.encode(_pooling(inputs))) for inputs in ([[1], [2], [3]], [[4, 4]])]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        worker.abort_all()
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [Draining, Draining]
        encoder.gate.set()
        await worker.wait_idle()
        assert len(encoder.batches) == 1


async def test_of_a_cancelled_call_no_further_input_is_computed() -> None:
    encoder = StandInEncoder()
    async with _embedding(encoder, max_tokens=2) as worker:
        call = asyncio.ensure_future(worker.encode(_pooling([[1], [2], [3], [4], [5]]), normalize=True))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        assert (await anext(worker.loads.watch(1.0))).waiting_tokens == 3
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        encoder.gate.set()
        await worker.wait_idle()
        assert [size for size, _ in encoder.batches] == [2]


async def test_a_cancelled_call_is_not_computed_and_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.encoding_queue.MAX_WAITING_CALLS", 1)
    encoder = StandInEncoder()
    async with _embedding(encoder) as worker:
        first = asyncio.ensure_future(worker.encode(_pooling([[1]]), normalize=True))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        cancelled = asyncio.ensure_future(worker.encode(_pooling([[2]]), normalize=True))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        last = asyncio.ensure_future(worker.encode(_pooling([[3], [4]]), normalize=True))
        await asyncio.sleep(0)
        encoder.gate.set()
        await asyncio.gather(first, last)
        assert [size for size, _ in encoder.batches] == [1, 2]


async def test_a_failed_batch_fails_its_calls_only() -> None:
    encoder = StandInEncoder(error=RuntimeError("boom"))
    async with _embedding(encoder) as worker:
        encoder.gate.set()
        with pytest.raises(ComputeFailed, match="boom"):
            await worker.encode(_pooling([[1]]), normalize=True)
        encoder.error = None
        assert _vectors((await worker.encode(_pooling([[5]]), normalize=True)).vectors) == [[5.0, 1.0]]


async def test_a_model_that_gives_no_usable_vectors_fails_its_calls_and_the_worker_lives() -> None:
    class Odd(StandInEncoder):
        answers: Sequence[object] = (np.zeros((2, 2), dtype=np.float32), [object()])

        def encode(
            self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
        ) -> Sequence[NDArray[np.float32]]:
            if not self.answers:
                return super().encode(inputs, task=task, normalize=normalize)
            answer, *self.answers = self.answers
            return answer  # type: ignore[return-value]

    encoder = Odd()
    async with _embedding(encoder) as worker, asyncio.timeout(10):
        encoder.gate.set()
        for _ in range(2):
            with pytest.raises(ComputeFailed):
                await worker.encode(_pooling([[1]]), normalize=True)
        assert _vectors((await worker.encode(_pooling([[5]]), normalize=True)).vectors) == [[5.0, 1.0]]


async def test_numbers_that_are_not_finite_fail_their_call_and_not_its_neighbours() -> None:
    class Overflowing(StandInEncoder):
        def encode(
            self, inputs: Sequence[PoolingInput], *, task: PoolingTask, normalize: bool
        ) -> Sequence[NDArray[np.float32]]:
            vectors = super().encode(inputs, task=task, normalize=normalize)
            return [np.where(vector == 7, np.float32("nan"), vector) for vector in vectors]

    encoder = Overflowing()
    async with _embedding(encoder) as worker, asyncio.timeout(10):
        calls = [asyncio.ensure_future(worker.encode(_pooling(inputs))) for inputs in ([[1]], [[2], [7]], [[3]])]
        await asyncio.sleep(0)
        encoder.gate.set()
        one, wrong, three = await asyncio.gather(*calls, return_exceptions=True)
        assert encoder.batches == [(4, True)]
        assert isinstance(wrong, ComputeFailed)
        for vector, encoded in ((1.0, one), (3.0, three)):
            assert not isinstance(encoded, BaseException)
            assert _vectors(encoded.vectors) == [[vector, 1.0]]


async def test_wrong_inputs_and_too_many_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.encoding_queue.MAX_WAITING_CALLS", 1)
    encoder = StandInEncoder()
    async with _embedding(encoder) as worker:
        wrong: list[list[int]]
        for wrong in ([[]], [[1], [VOCABULARY_SIZE]], [[1] * 1000]):
            with pytest.raises(InvalidRequest):
                await worker.encode(_pooling(wrong), normalize=True)
        assert (await worker.encode(_pooling([]), normalize=True)).vectors == ()
        running = asyncio.ensure_future(worker.encode(_pooling([[1]]), normalize=True))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(encoder.entered.wait, 5)
        waiting = asyncio.ensure_future(worker.encode(_pooling([[1]]), normalize=True))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await worker.encode(_pooling([[1]]), normalize=True)
        worker.begin_drain()
        with pytest.raises(Draining):
            await worker.encode(_pooling([[1]]), normalize=True)
        encoder.gate.set()
        await asyncio.gather(running, waiting)
