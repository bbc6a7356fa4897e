"""EmbeddingService as its clients see it, over real gRPC, on workers without a model."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fake_workers import until
from router.embedding_admission import AdmittedInput, admit_inputs
from router.worker_entry import ServedModel
from served_router import MAX_INPUT_TOKENS, details, failing, floats, ids_of, serving, vector_of
from twinstage.errors import ComputeFailed
from twinstage.rpc.convert_public import encode_stream_request_from_proto
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import RawEncodeRequest
from twinstage.v1 import common_pb2, embedding_pb2, generation_pb2


async def test_embed_keeps_the_order_over_batches_and_workers() -> None:
    async with serving(embed=2) as service:
        texts = ["abcdefghijkl"[: 1 + index % 12] for index in range(300)]
        response = await service.embedding.Embed(embedding_pb2.EmbedRequest(texts=texts), timeout=10)
        assert [embedding.index for embedding in response.embeddings] == list(range(300))
        for text, embedding in zip(texts, response.embeddings, strict=True):
            assert embedding.values == pytest.approx(vector_of(text, normalize=True))
            assert embedding.prompt_tokens == len(text)
            assert embedding.dimensions == 4
        assert response.usage.prompt_tokens == sum(map(len, texts))
        assert all(worker.served for worker in service.embedders.prefill)
        assert max(size for worker in service.embedders.prefill for size in worker.encode_batches) <= 64


async def test_embedding_options() -> None:
    async with serving() as service:
        request = embedding_pb2.EmbedRequest(texts=["abc"], normalize=False)
        embedding = (await service.embedding.Embed(request, timeout=10)).embeddings[0]
        assert list(embedding.values) == vector_of("abc", normalize=False)
        request = embedding_pb2.EmbedRequest(texts=["abc"], dimensions=2)
        embedding = (await service.embedding.Embed(request, timeout=10)).embeddings[0]
        first, second = vector_of("abc", normalize=False)[:2]
        length = (first**2 + second**2) ** 0.5
        assert embedding.values == pytest.approx([first / length, second / length])
        request = embedding_pb2.EmbedRequest(
            texts=["abc"], normalize=False, format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32
        )
        embedding = (await service.embedding.Embed(request, timeout=10)).embeddings[0]
        assert floats(embedding.packed) == vector_of("abc", normalize=False)
        request.format = embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT16
        embedding = (await service.embedding.Embed(request, timeout=10)).embeddings[0]
        assert list(struct.unpack("<4e", embedding.packed)) == vector_of("abc", normalize=False)


async def test_encode_takes_text_and_token_ids_and_refuses_what_is_too_long() -> None:
    async with serving() as service:
        inputs = [
            embedding_pb2.EncodeInput(text="abc"),
            embedding_pb2.EncodeInput(token_ids=common_pb2.TokenIds(ids=ids_of("abc"))),
        ]
        response = await service.embedding.Encode(embedding_pb2.EncodeRequest(inputs=inputs), timeout=10)
        assert list(response.embeddings[0].values) == list(response.embeddings[1].values)
        inputs.append(embedding_pb2.EncodeInput(text="x" * (MAX_INPUT_TOKENS + 1)))
        error = await failing(service.embedding.Encode(embedding_pb2.EncodeRequest(inputs=inputs), timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == "inputs[2].text"


async def test_a_text_to_embed_is_tokenized_only_as_far_as_the_model_could_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 characters at most, the longest token of this tokenizer, one more is looked at than the model takes."""
    tokenized: list[int] = []
    encode = TextTokenizer.encode

    def counting(self: TextTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", counting)
    text = "ab" * 50_000 + "yz"
    async with serving() as service:
        error = await failing(service.embedding.Embed(embedding_pb2.EmbedRequest(texts=["a", text]), timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        (violation,) = details(error)["BadRequest"].field_violations
        assert violation.field == "texts[1]"
        assert "100002 characters, more than the model's limit of 12 tokens can hold" in violation.description
        sides = {embedding_pb2.TRUNCATION_SIDE_RIGHT: "ab" * 6, embedding_pb2.TRUNCATION_SIDE_LEFT: "ab" * 5 + "yz"}
        for side, kept in sides.items():
            cut = embedding_pb2.Truncation(tokens=MAX_INPUT_TOKENS, side=side)
            response = await service.embedding.Embed(
                embedding_pb2.EmbedRequest(texts=[text], truncation=cut, normalize=False), timeout=10
            )
            assert list(response.embeddings[0].values) == vector_of(kept, normalize=False)
    assert max(tokenized) <= (MAX_INPUT_TOKENS + 1) * 64


async def test_prompts_do_not_wait_for_texts_to_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slowly(raw: RawEncodeRequest, model: ServedModel) -> list[AdmittedInput]:
        begun.set()
        go_on.wait(20)
        return admit_inputs(raw, model)

    monkeypatch.setattr("router.embedding.admit_inputs", slowly)
    async with serving("--tokenizer-threads", "1") as service:
        embedding = service.embedding.Embed(embedding_pb2.EmbedRequest(texts=["abc"]), timeout=30)
        try:
            await until(begun.is_set, what="the text is being tokenized")
            await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        finally:
            go_on.set()
        await embedding


async def test_failed_batch_is_retried_on_another_worker() -> None:
    async with serving(embed=2) as service:
        service.embedders.prefill[0].script.fail("encode", ComputeFailed("no"), times=99)
        for _ in range(2):
            response = await service.embedding.Embed(embedding_pb2.EmbedRequest(texts=["abc"]), timeout=10)
            assert response.placement.prefill_worker == "embed-prefill-1"


async def test_encode_stream_keeps_the_order_and_gives_each_item_its_own_status() -> None:
    async with serving(embed=2) as service:
        texts = [("x" * 20 if index % 7 == 3 else "abcdef"[: 1 + index % 6]) for index in range(400)]

        async def requests() -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
            for text in texts:
                yield embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text=text))

        responses = [response async for response in service.embedding.EncodeStream(requests(), timeout=20)]
        assert [response.index for response in responses] == list(range(400))
        for text, response in zip(texts, responses, strict=True):
            if len(text) > MAX_INPUT_TOKENS:
                assert (response.error.code, response.error.reason) == (3, "INVALID_REQUEST")
            else:
                assert response.embedding.values == pytest.approx(vector_of(text, normalize=True))
        batches = [size for worker in service.embedders.prefill for size in worker.encode_batches]
        assert len(batches) < len(texts)


async def test_encode_stream_bounds_what_is_in_flight_and_can_be_cancelled() -> None:
    async with serving() as service:
        sent = 0
        for _ in range(8):
            service.embedders.prefill[0].script.stall("encode")

        async def requests() -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
            nonlocal sent
            for _ in range(100_000):
                sent += 1
                yield embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="a" * 12))

        call = service.embedding.EncodeStream(requests(), timeout=20)
        reading = asyncio.create_task(call.read())
        await service.embedders.prefill[0].script.reached("encode").wait()
        await asyncio.sleep(0.3)
        assert sent < 5000
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def test_encode_stream_bounds_the_bytes_in_flight_and_serves_what_is_larger_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []  # by the router; clients send what gRPC's windows hold

    def counting(request: embedding_pb2.EncodeStreamRequest) -> RawEncodeRequest:
        read.append(len(request.input.token_ids.ids))
        return encode_stream_request_from_proto(request)

    monkeypatch.setattr("router.embedding_stream.MAX_IN_FLIGHT_BYTES", 4 * 1024)
    monkeypatch.setattr("router.service.embedding.encode_stream_request_from_proto", counting)
    async with serving() as service:
        worker = service.embedders.prefill[0]
        stalled = [worker.script.stall("encode") for _ in range(2)]

        async def requests() -> AsyncIterator[embedding_pb2.EncodeStreamRequest]:
            for count in (1, 1, 1000, 1000, 1, 1000):  # one more is read than has room
                ids = common_pb2.TokenIds(ids=[3] * count)
                cut = embedding_pb2.Truncation(tokens=2)
                yield embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(token_ids=ids), truncation=cut)

        call = service.embedding.EncodeStream(requests(), timeout=20)
        answers = asyncio.create_task(_all_of(call))
        await worker.script.reached("encode").wait()
        await asyncio.sleep(0.1)
        assert read == [1, 1, 1000]
        for event in stalled:
            event.set()
        responses = await answers
        assert [response.index for response in responses] == [0, 1, 2, 3, 4, 5]
        assert [response.embedding.prompt_tokens for response in responses] == [1, 1, 2, 2, 1, 2]


async def _all_of(call: Any) -> list[Any]:
    return [response async for response in call]


async def test_a_stream_waits_while_the_router_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gate.MIN_RETRY_AFTER_S", 0.1)
    monkeypatch.setattr("router.gate.MAX_RETRY_AFTER_S", 0.1)
    async with serving("--max-live-requests", "1", "--max-queued-requests", "1") as service:
        worker = service.embedders.prefill[0]
        stalled = [worker.script.stall("encode") for _ in range(2)]
        text = embedding_pb2.EmbedRequest(texts=["a"])
        others = [asyncio.ensure_future(_answered(service.embedding.Embed(text, timeout=20))) for _ in range(2)]
        await worker.script.reached("encode").wait()
        await until(lambda: service.router._embedding_gate.queued == 1, what="a full queue")
        assert (await failing(service.embedding.Embed(text, timeout=20))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        requests = [embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="b"))] * 3
        stream = asyncio.create_task(_all_of(service.embedding.EncodeStream(iter(requests), timeout=20)))
        await asyncio.sleep(0.2)
        assert not stream.done()
        for event in stalled:
            event.set()
        assert [answer.HasField("embedding") for answer in await stream] == [True] * 3
        await asyncio.gather(*others)


async def _answered(call: Any) -> Any:
    return await call


async def test_encode_stream_wants_one_model() -> None:
    async with serving() as service:
        requests = [
            embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="a"), model="embedder"),
            embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="a"), model="other"),
            embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="a"), format=9),  # type: ignore[arg-type]
            embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text="a")),
        ]
        responses = [response async for response in service.embedding.EncodeStream(iter(requests), timeout=10)]
        assert [response.WhichOneof("result") for response in responses] == ["embedding", "error", "error", "error"]
