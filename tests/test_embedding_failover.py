"""Embeddings through the loss of workers: they wait for one to come back, and one that workers die of is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fake_workers import FakePrefill, until
from router import embedding_stream
from router.encoder import BatchEncoder, Vector
from router.gate import Gate
from router.generation import Deadlines
from router.quotas import Quotas
from router.together import run_together
from served_router import Service, details, failing, serving, vector_of
from twinstage.errors import NoWorker, Overloaded
from twinstage.types import PoolingTask, RawEncodeRequest, Task
from twinstage.v1 import embedding_pb2


async def test_an_embedding_waits_for_its_only_worker_to_come_back() -> None:
    async with serving("--worker-wait", "5") as service:
        (worker,) = service.embedders.prefill
        worker.script.stall("encode")
        call = asyncio.create_task(embed_alone(service, "abc"))
        await worker.script.reached("encode").wait()
        await worker.kill()
        await asyncio.sleep(0.2)
        assert not call.done()
        await worker.restart()
        response = await call
        assert list(response.embeddings[0].values) == pytest.approx(vector_of("abc", normalize=True))
        assert response.placement.retries == 1
        worker.script.fail("encode", Overloaded("full"), times=2)
        began_s = time.monotonic()
        assert (await embed_alone(service, "abc")).placement.retries == 2
        assert time.monotonic() - began_s > 0.2, "it pauses before it goes back to a worker that refused it"


async def test_a_stream_waits_for_its_only_worker_and_an_input_that_cannot_be_computed_fails_alone() -> None:
    async with serving("--worker-wait", "0", "--max-attempts", "1") as service:
        (worker,) = service.embedders.prefill
        worker.fails_at = 7
        texts = ["ab", "abcdefg", "abc", "b"]
        inputs: asyncio.Queue[str] = asyncio.Queue()

        async def requests() -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
            while text := await inputs.get():
                yield embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text=text))

        call = service.embedding.EncodeStream(requests(), timeout=30)
        inputs.put_nowait("a")
        assert (await call.read()).HasField("embedding")
        await worker.kill()
        await until(lambda: not service.router.workers.models["embedder"].prefill, what="the loss")
        for text in [*texts, ""]:
            inputs.put_nowait(text)
        answer = asyncio.create_task(call.read())
        await asyncio.sleep(0.2)
        assert not answer.done(), "another router would know nothing of the stream"
        await worker.restart()
        answers = [await answer, *[await call.read() for _ in texts[1:]]]
        assert [answer.HasField("embedding") for answer in answers] == [True, False, True, True]
        assert answers[1].error.reason == "COMPUTE_FAILED"
        assert list(answers[2].embedding.values) == pytest.approx(vector_of("abc", normalize=True))
        assert (await failing(embed_alone(service, texts[1]))).code() is grpc.StatusCode.UNAVAILABLE


async def test_an_embedding_that_workers_die_of_is_refused_and_those_beside_it_live() -> None:
    poison = "x" * 11
    async with serving("--worker-wait", "5", "--max-attempts", "20", embed=2) as service:
        workers = service.embedders.prefill
        for worker in workers:
            worker.script.stall("encode")  # one of the others is there when it dies
            worker.hangs_at = len(poison)
        watchers = [asyncio.create_task(_dying_of_inputs(worker)) for worker in workers]
        try:
            innocent = [asyncio.create_task(embed_alone(service, "abc")) for _ in range(4)]
            await until(lambda: all(worker.script.reached("encode").is_set() for worker in workers), what="company")
            error = await failing(embed_alone(service, poison))
            answers = await asyncio.gather(*innocent)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert details(error)["ErrorInfo"].reason == "POISONED_REQUEST"
        assert any(answer.placement.retries for answer in answers), "some were there when a worker died"
        for answer in answers:
            assert list(answer.embeddings[0].values) == pytest.approx(vector_of("abc", normalize=True))
        deaths = [worker.description.epoch - 1 for worker in workers]
        assert sum(deaths) in {2, 3}
        again = await failing(embed_alone(service, poison))  # is refused before a worker sees it
        assert details(again)["ErrorInfo"].reason == "POISONED_REQUEST"
        assert "this very request" in str(again.details())


async def embed_alone(service: Service, text: str) -> embedding_pb2.EmbedResponse:
    response: embedding_pb2.EmbedResponse = await service.embedding.Embed(
        embedding_pb2.EmbedRequest(texts=[text]), timeout=20
    )
    return response


async def _dying_of_inputs(worker: FakePrefill) -> None:
    """Kill the worker whenever it computes for the input on which it hangs, and start it again."""
    while True:
        await until(
            lambda: any(worker.hangs_at in call for call in worker.encoding.values()), what="poison", timeout_s=60
        )
        await asyncio.sleep(0.05)  # for those who are there as well
        await worker.kill()
        worker.running.clear()
        worker.encoding.clear()
        await worker.restart()


async def test_a_client_may_leave_a_stream_in_the_moment_in_which_its_vectors_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing, computed, failures = asyncio.Event(), asyncio.Event(), []

    async def encode(inputs: Sequence[Any], call: Any) -> list[Vector]:
        computing.set()
        await computed.wait()
        return [Vector(data=b"", prompt_tokens=1)] * len(inputs)

    async def admit(*_: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(token_ids=[1])]

    async def requests() -> AsyncIterator[RawEncodeRequest]:
        yield RawEncodeRequest(inputs=(None,))

    model = SimpleNamespace(name="m", description=SimpleNamespace(task=Task.EMBED))
    embedding = SimpleNamespace(
        admit=admit, find_model=lambda *_: model, encoder=SimpleNamespace(encode=encode), quotas=Quotas()
    )
    gate, deadlines = Gate(max_live=1, max_queued=1), Deadlines(default_s=20, longest_s=20)
    stream = embedding_stream.EmbeddingStream(embedding, gate=gate, deadlines=deadlines, timeout_s=20)  # type: ignore[arg-type]
    monkeypatch.setattr(embedding_stream.logger, "exception", lambda *words, **_: failures.append(words))
    reading = asyncio.create_task(anext(stream.results(requests())))
    await computing.wait()
    computed.set()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not failures
    assert gate.live == 0


async def _work_of_encoder(*work: Coroutine[Any, Any, Any]) -> None:
    """Have an encoder do this work, as if each piece were a batch."""
    encoder, left = BatchEncoder.__new__(BatchEncoder), list(work)
    encoder._encode_batch = lambda *_: left.pop(0)  # type: ignore[method-assign,assignment]
    entry = SimpleNamespace(task=PoolingTask.EMBED, worker_normalizes=True, token_ids=[1] * 4096)
    call = SimpleNamespace(model=SimpleNamespace(prefill=("a worker",)))
    await encoder.encode([entry] * len(work), call)  # type: ignore[list-item,arg-type]


@pytest.mark.parametrize("at_once", [_work_of_encoder, lambda *work: run_together(work, at_once=9)])
async def test_work_that_is_cancelled_while_a_part_of_it_fails_is_cancelled(
    at_once: Callable[..., Coroutine[Any, Any, Any]],
) -> None:
    """Who works in a loop, such as for a stream whose client has gone, would take the failure and go on for ever."""
    failed, may_end = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        failed.set()
        raise NoWorker("none is left")

    async def takes_its_time_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await may_end.wait()

    working = asyncio.create_task(at_once(takes_its_time_to_end(), fails()))
    await failed.wait()
    await asyncio.sleep(0.01)
    working.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    with pytest.raises(NoWorker):
        await at_once(fails(), fails())
