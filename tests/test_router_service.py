"""The router as its clients see it: every public method over real gRPC, on workers without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fake_workers import FakeCluster, make_bundle, make_model, make_vector, until
from router.__main__ import Router
from router.config import RouterSettings
from router.embedding_admission import AdmittedInput, admit_inputs
from router.service import EMBEDDING_SERVICE, GENERATION_SERVICE
from router.service.context import caller_of, host_of
from router.service.generation import convert_answer
from router.worker_entry import ServedModel
from twinstage.errors import ComputeFailed, ConfigError, Unavailable
from twinstage.rpc.convert_public import encode_stream_request_from_proto
from twinstage.settings import read_settings
from twinstage.text.answers.joining import MessageJoiner
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import ProducedToken, RawEncodeRequest, Task, TokenAlternative, TokenLogprobs, WorkerLoad
from twinstage.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

MAX_INPUT_TOKENS = 12


@dataclass
class Service:
    router: Router
    generators: FakeCluster
    embedders: FakeCluster
    channel: grpc.aio.Channel

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def embedding(self) -> Any:
        return embedding_pb2_grpc.EmbeddingServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)


@contextlib.asynccontextmanager
async def serving(
    *flags: str, prefill: int = 1, decode: int = 1, embed: int = 1, wait: bool = True
) -> AsyncIterator[Service]:
    bundle = make_bundle(max_input_tokens=MAX_INPUT_TOKENS)
    embedding_model = make_model(name="embedder", task=Task.EMBED, bundle=bundle)
    async with (
        FakeCluster(prefill=prefill, decode=decode) as generators,
        FakeCluster(prefill=embed, decode=0, model=embedding_model, bundle=bundle, prefix="embed-") as embedders,
    ):
        addresses = [*generators.addresses, *embedders.addresses] or ["127.0.0.1:1"]
        workers = [argument for address in addresses for argument in ("--workers", address)]
        settings = read_settings(
            RouterSettings, ["--listen", "127.0.0.1:0", "--report-interval", "0.3", *workers, *flags]
        )
        router = Router(settings)
        await router.start()
        try:
            if wait:
                await until(lambda: all(entry.life and entry.life.load for entry in router.workers.entries), what="all")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                yield Service(router, generators, embedders, channel)
            await generators.assert_idle()
            await embedders.assert_idle()
        finally:
            await router.stop()


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details of a failed call by message name."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.ErrorInfo,
            error_details_pb2.ResourceInfo,
            error_details_pb2.RetryInfo,
        ):
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


async def failing(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# --- generation -----------------------------------------------------------------------------------


async def test_bare_prompt_works() -> None:
    async with serving() as service:
        request = json_format.ParseDict({"prompt": "Hello"}, generation_pb2.GenerateRequest())
        response = await service.generation.Generate(request, timeout=10)
        assert len(response.results) == 1
        assert len(response.results[0].text) == 16
        assert response.results[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert response.model == "fake"
        assert response.request_id
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (5, 16)
        assert response.placement.prefill_worker == "prefill-0"
        assert response.placement.kv_bytes == 200


async def test_stream_equals_unary_and_has_its_events_in_order() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(
            prompt="Hello",
            request_id="mine",
            sampling=common_pb2.SamplingOptions(seed=3),
            stopping=common_pb2.StoppingOptions(max_tokens=20),
            output=common_pb2.OutputOptions(logprobs=0, return_token_ids=True),
        )
        unary = await service.generation.Generate(request, timeout=10)
        events = [event async for event in service.generation.GenerateStream(request, timeout=10)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "prompt_info"
        assert kinds[-2:] == ["finished", "summary"]
        assert set(kinds[1:-2]) == {"delta"}
        assert events[0].prompt_info.request_id == "mine"
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        assert "".join(delta.text for delta in deltas) == unary.results[0].text
        assert [token for delta in deltas for token in delta.token_ids] == list(unary.results[0].token_ids)
        assert sum(len(delta.logprobs) for delta in deltas) == len(unary.results[0].logprobs) == 20
        assert events[-1].summary.usage == unary.usage


async def test_every_prompt_and_choice_has_its_result_streamed_or_not() -> None:
    async with serving() as service:
        prompts = [generation_pb2.PromptInput(prompt=text) for text in ("one", "two")]
        request = generation_pb2.GenerateRequest(
            batch=generation_pb2.PromptBatch(prompts=prompts),
            sampling=common_pb2.SamplingOptions(seed=3, n=3),
            output=common_pb2.OutputOptions(logprobs=0, return_token_ids=True),
        )
        unary = await service.generation.Generate(request, timeout=10)
        assert [result.index for result in unary.results] == list(range(6))
        assert len({result.text for result in unary.results}) == 6
        assert (unary.usage.prompt_tokens, unary.usage.completion_tokens) == (6, 6 * 16)
        events = [event async for event in service.generation.GenerateStream(request, timeout=10)]
        assert [event.WhichOneof("event") for event in events].count("prompt_info") == 1
        assert sorted(event.finished.index for event in events if event.HasField("finished")) == list(range(6))
        for result in unary.results:
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == result.index]
            assert "".join(delta.text for delta in deltas) == result.text
            assert [token for delta in deltas for token in delta.token_ids] == list(result.token_ids)
            assert sum(len(delta.logprobs) for delta in deltas) == len(result.logprobs) == 16
        assert events[-1].summary.usage == unary.usage
        chat = generation_pb2.ChatRequest(
            messages=[generation_pb2.ChatMessage(role="user", content="hi")],
            sampling=common_pb2.SamplingOptions(seed=3, n=2),
        )
        answers = (await service.generation.Chat(chat, timeout=10)).results
        assert [answer.index for answer in answers] == [0, 1]
        chat.sampling.n = 1
        assert (await service.generation.Chat(chat, timeout=10)).results[0] == answers[0] != answers[1]


async def test_every_prompt_has_its_log_probabilities_although_it_is_a_single_token() -> None:
    async with serving() as service:
        prompts = [generation_pb2.PromptInput(prompt_token_ids=common_pb2.TokenIds(ids=ids)) for ids in ([5], [5, 6])]
        request = generation_pb2.GenerateRequest(
            batch=generation_pb2.PromptBatch(prompts=prompts), output=common_pb2.OutputOptions(prompt_logprobs=0)
        )
        scores = (await service.generation.Generate(request, timeout=10)).prompt_logprobs
        assert [(entry.prompt_index, entry.start, len(entry.tokens)) for entry in scores] == [(0, 1, 0), (1, 1, 1)]


async def test_chat() -> None:
    async with serving() as service:
        request = generation_pb2.ChatRequest(
            messages=[generation_pb2.ChatMessage(role="user", content="hi")],
            sampling=common_pb2.SamplingOptions(seed=3),
        )
        answer = await service.generation.Chat(request, timeout=10)
        assert answer.results[0].message.role == "assistant"
        assert answer.results[0].finish_reason == common_pb2.FINISH_REASON_CONTEXT_LIMIT
        events = [event async for event in service.generation.ChatStream(request, timeout=10)]
        text = "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta")
        assert text == answer.results[0].message.content


async def test_bad_fields_come_back_with_their_paths() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=[1, 999]),
            sampling=common_pb2.SamplingOptions(temperature=float("nan")),
            stopping=common_pb2.StoppingOptions(stop=["a", ""]),
        )
        for call in (service.generation.Generate(request), service.generation.GenerateStream(request).read()):
            error = await failing(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            fields = {violation.field for violation in details(error)["BadRequest"].field_violations}
            assert fields == {"prompt_token_ids.ids[1]", "sampling.temperature", "stopping.stop[1]"}
        assert not service.generators.prefill[0].specs


async def test_errors_by_the_table() -> None:
    async with serving() as service:
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details(error)["ResourceInfo"].resource_name == "other"
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", model="embedder")))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details(error)["ErrorInfo"].reason == "TASK_NOT_SUPPORTED"
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="")))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x" * 64)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        many = common_pb2.SamplingOptions(n=9)
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x", sampling=many)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == "sampling.n"
        service.generators.prefill[0].script.fail("first_token", ComputeFailed("no"), times=3)
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)["RetryInfo"].retry_delay.seconds == 1


async def test_no_initial_metadata_before_the_first_token() -> None:
    async with serving() as service:
        go_on = service.generators.prefill[0].script.stall("first_token")
        call = service.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        metadata = asyncio.create_task(call.initial_metadata())
        await service.generators.prefill[0].script.reached("first_token").wait()
        await asyncio.sleep(0.1)
        assert not metadata.done()
        go_on.set()
        assert (await call.read()).WhichOneof("event") == "prompt_info"
        await metadata
        call.cancel()


@pytest.mark.parametrize("phase", ["first_token", "decode 3"])
async def test_client_that_goes_away_frees_the_workers(phase: str) -> None:
    async with serving() as service:
        worker = service.generators.prefill[0] if phase == "first_token" else service.generators.decode[0]
        worker.script.stall(phase)
        call = service.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        await asyncio.wait_for(_first_read_or_phase(call, worker.script.reached(phase)), 5)
        call.cancel()
        await service.generators.assert_idle()
        assert (await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)).results


async def _first_read_or_phase(call: Any, reached: asyncio.Event) -> None:
    reading = asyncio.create_task(call.read())
    await reached.wait()
    await asyncio.wait({reading}, timeout=0.05)


async def test_deadline_of_the_client_is_honoured() -> None:
    async with serving() as service:
        service.generators.decode[0].script.stall("reserve")
        started = time.monotonic()
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.4 < time.monotonic() - started < 1.5


async def test_default_timeout_applies_when_the_client_sets_none() -> None:
    async with serving("--default-timeout", "0.4") as service:
        service.generators.decode[0].script.stall("reserve")
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello")))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_full_queue_refuses_early_and_says_when_to_come_back() -> None:
    async with serving("--max-live-requests", "1", "--max-queued-requests", "0") as service:
        go_on = service.generators.prefill[0].script.stall("first_token")
        first = service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)
        await service.generators.prefill[0].script.reached("first_token").wait()
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        go_on.set()
        assert (await first).results


async def test_turns_are_shared_between_callers_as_the_call_names_them() -> None:
    """Without tokens, `x-caller` tells callers apart, else the host, which they all share here."""
    async with serving("--max-live-requests", "1", "--max-queued-requests", "12") as service:
        prefill = service.generators.prefill[0]
        go_on = prefill.script.stall("first_token")

        def call(request_id: str, **options: Any) -> Any:
            request = generation_pb2.GenerateRequest(prompt="Hello", request_id=request_id)
            return service.generation.Generate(request, timeout=20, **options)

        calls = [call("held")]
        await prefill.script.reached("first_token").wait()
        calls += [call(f"many-{number}") for number in range(12)]
        await until(lambda: service.router._generation_gate.queued == 12, what="a full queue")
        calls.append(call("one", metadata=(("x-caller", "one"),)))
        refused = await failing(calls[12])  # of the caller that has most of the queue, the newest
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.trailing_metadata()["grpc-retry-pushback-ms"]
        go_on.set()
        await asyncio.gather(*calls[:12], calls[13])
        assert [spec.request_id.partition("#")[0] for spec in prefill.specs][:3] == ["held", "one", "many-0"]


async def _caller_at(address: str, target: str) -> str:
    """Who a real server takes a client of `target` for."""
    seen: list[str] = []

    async def handle(request: bytes, context: Any) -> bytes:
        seen.append(caller_of(context))
        return b""

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(target.replace("PORT", str(port))) as channel:
            await channel.unary_unary("/test.Service/Call")(b"", timeout=10)
    finally:
        await server.stop(None)
    return seen[0]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_a_caller_without_a_name_goes_by_the_address_of_its_host(tmp_path: Path) -> None:
    assert await _caller_at("127.0.0.1:0", "127.0.0.1:PORT") == "127.0.0.1"
    if _has_ipv6():
        assert await _caller_at("[::1]:0", "[::1]:PORT") == "::1"
    path = f"unix:{tmp_path}/socket"
    assert (await _caller_at(path, path)).startswith("unix:")
    assert host_of("ipv6:%5B2001:db8::7%5D:54321") == "2001:db8::7"


async def test_priorities_count_no_more_than_the_queue_can_wait_for() -> None:
    """A level is ten seconds: within the default of 60 s, two up or down; and workers hear of no more."""
    for flags, counted in (((), 2), (("--max-queue-wait", "20"), 0), (("--max-priority", "7"), 7)):
        async with serving(*flags) as service:
            for asked in (100, -100, 1):
                request = generation_pb2.GenerateRequest(prompt="Hello", priority=asked)
                await service.generation.Generate(request, timeout=10)
            told = [spec.priority for spec in service.generators.prefill[0].specs]
            assert told == [counted, -counted, min(counted, 1)]


async def test_two_hundred_calls_fifty_at_a_time() -> None:
    async with serving(prefill=2, decode=2) as service:
        slots = asyncio.Semaphore(50)

        async def call() -> str:
            async with slots:
                request = generation_pb2.GenerateRequest(prompt="Hello", sampling=common_pb2.SamplingOptions(seed=1))
                return (await service.generation.Generate(request, timeout=20)).results[0].text

        assert len(set(await asyncio.gather(*(call() for _ in range(200))))) == 1


# --- embedding ------------------------------------------------------------------------------------


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def vector_of(text: str, *, normalize: bool) -> list[float]:
    bundle_ids = _ids(text)
    return floats(make_vector(bundle_ids, normalize=normalize))


def _ids(text: str) -> list[int]:
    from twinstage.text.tokenizer import TextTokenizer

    return TextTokenizer(make_bundle()).encode(text)


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
            embedding_pb2.EncodeInput(token_ids=common_pb2.TokenIds(ids=_ids("abc"))),
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


# --- the other services ---------------------------------------------------------------------------


async def test_tokenizer_service() -> None:
    async with serving() as service:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        tokenized = await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="Hi you", model="fake"))
        assert list(tokenized.tokens) == ["H", "i", "Ġ", "y", "o", "u"]
        joined = await stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=tokenized.token_ids, model="fake"))
        assert joined.text == "Hi you"
        error = await failing(stub.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[999], model="fake")))
        assert details(error)["BadRequest"].field_violations[0].field == "token_ids[0]"
        error = await failing(stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="x")))
        assert details(error)["BadRequest"].field_violations[0].field == "model"
        messages = [generation_pb2.ChatMessage(role="user", content="hi")]
        rendered = await stub.RenderChat(tokenizer_pb2.RenderChatRequest(messages=messages))
        assert rendered.text == "user:hi;"
        assert len(rendered.token_ids) == 8


async def test_models_workers_and_server_info() -> None:
    async with serving() as service:
        stub: Any = model_pb2_grpc.ModelServiceStub(service.channel)
        models = (await stub.ListModels(model_pb2.ListModelsRequest())).models
        assert [(model.name, model.ready) for model in models] == [("embedder", True), ("fake", True)]
        model = (await stub.GetModel(model_pb2.GetModelRequest(name="fake"))).model
        assert (model.prefill_workers, model.decode_workers, model.max_model_len) == (1, 1, 64)
        error = await failing(stub.GetModel(model_pb2.GetModelRequest(name="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        workers = (await service.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        assert [worker.id for worker in workers] == ["decode-0", "embed-prefill-0", "prefill-0"]
        assert {worker.state for worker in workers} == {admin_pb2.WORKER_STATE_READY}
        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert (info.live_requests, info.max_live_requests) == (0, 16)
        assert info.version


async def test_as_many_requests_are_let_in_as_the_decode_workers_keep_busy() -> None:
    async with serving(decode=3) as service:
        workers = service.router.workers
        rows = sum(worker.description.max_num_sequences for worker in service.generators.decode)
        assert workers.decode_rows == rows
        request = admin_pb2.GetServerInfoRequest()
        assert (await service.admin.GetServerInfo(request)).max_live_requests == max(16, 2 * rows)
        service.generators.decode[0].report(WorkerLoad(draining=True))
        await until(lambda: workers.decode_rows == rows * 2 // 3, what="one drains")
        assert (await service.admin.GetServerInfo(request)).max_live_requests == max(16, 2 * workers.decode_rows)
    async with serving("--max-live-requests", "7") as service:
        assert (await service.admin.GetServerInfo(request)).max_live_requests == 7


async def test_old_connections_are_replaced() -> None:
    flags = ("--max-connection-age", "0.2", "--max-connection-age-grace", "5")
    async with serving(*flags) as service:
        states: list[grpc.ChannelConnectivity] = []
        await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())

        async def watch() -> None:
            state = service.channel.get_state()
            while True:
                await service.channel.wait_for_state_change(state)
                states.append(state := service.channel.get_state())

        watcher = asyncio.create_task(watch())
        await until(lambda: grpc.ChannelConnectivity.IDLE in states, what="the connection was ended")
        watcher.cancel()
        await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())


async def test_operator_aborts_a_stream() -> None:
    async with serving() as service:
        service.generators.decode[0].script.stall("decode 3")
        request = generation_pb2.GenerateRequest(prompt="Hello", request_id="mine")
        call = service.generation.GenerateStream(request, timeout=10)
        events = []
        async for event in call:
            if not events:
                await service.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="mine"))
            events.append(event)
        assert events[-2].finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert events[-1].WhichOneof("event") == "summary"
        error = await failing(service.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="mine")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def reset(service: Service, **chosen: str) -> dict[str, int]:
    response = await service.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(**chosen), timeout=10)
    return {worker.worker_id: worker.dropped_blocks for worker in response.workers}


async def test_prefix_caches_are_reset_on_all_workers_or_on_those_that_are_named() -> None:
    async with serving(prefill=2) as service:
        decode, first = service.generators.decode[0], service.generators.prefill[0]
        decode.cached_blocks = 7
        assert await reset(service) == {"decode-0": 7, "embed-prefill-0": 5, "prefill-0": 5, "prefill-1": 5}
        assert await reset(service, model="fake") == {"decode-0": 7, "prefill-0": 5, "prefill-1": 5}
        assert await reset(service, worker_id="prefill-0") == {"prefill-0": 5}
        assert (first.resets, decode.resets) == (3, 2)
        for chosen in ({"model": "other"}, {"worker_id": "other"}, {"worker_id": "prefill-0", "model": "embedder"}):
            error = await failing(service.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(**chosen)))
            assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_decode_workers_are_reset_after_all_prefill_workers() -> None:
    async with serving(prefill=2, embed=0) as service:
        decode, last = service.generators.decode[0], service.generators.prefill[1]
        release = last.script.stall("reset")
        task = asyncio.create_task(reset(service))
        await last.script.reached("reset").wait()
        await asyncio.sleep(0.05)
        assert decode.resets == 0
        release.set()
        assert await task == {"decode-0": 5, "prefill-0": 5, "prefill-1": 5}
        assert decode.resets == 1


async def test_a_worker_that_was_lost_is_reset_before_it_serves_again() -> None:
    async with serving(embed=0) as service:
        prefill = service.generators.prefill[0]
        await prefill.kill()
        await until(lambda: not service.router.workers.models["fake"].prefill, what="the worker is lost")
        assert await reset(service) == {"decode-0": 5}
        await prefill.start()
        await until(lambda: bool(service.router.workers.models["fake"].prefill), what="the worker is back")
        assert prefill.resets == 1


async def test_a_worker_that_cannot_be_reset_fails_the_call_and_owes_it() -> None:
    async with serving(embed=0) as service:
        prefill, decode = service.generators.prefill[0], service.generators.decode[0]
        prefill.script.fail("reset", Unavailable("busy"))
        error = await failing(service.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (prefill.resets, decode.resets) == (0, 1)
        assert await reset(service) == {"decode-0": 5, "prefill-0": 5}


async def test_health_follows_the_workers() -> None:
    async with serving(embed=0) as service:

        async def status(name: str) -> str:
            response = await service.health.Check(health_pb2.HealthCheckRequest(service=name))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

        assert [await status(name) for name in ("", GENERATION_SERVICE, EMBEDDING_SERVICE)] == [
            "SERVING",
            "SERVING",
            "NOT_SERVING",
        ]
        watch = service.health.Watch(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        service.generators.decode[0].report(WorkerLoad(draining=True))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        assert await status("") == "NOT_SERVING"


async def test_without_workers_nothing_serves_and_requests_are_told_to_come_back() -> None:
    async with serving(prefill=0, decode=0, embed=0, wait=False) as service:
        response = await service.health.Check(health_pb2.HealthCheckRequest(service=""))
        assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "RetryInfo" in details(error)


# --- the process ----------------------------------------------------------------------------------


def test_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(
        RouterSettings, ["--workers", "a:1,b:2", "--workers", "dns:///c:3", "--log-format", "json"]
    )
    assert settings.workers == ["a:1", "b:2", "dns:///c:3"]
    monkeypatch.setenv("TWINSTAGE_WORKERS", "x:1, y:2")
    monkeypatch.setenv("TWINSTAGE_MAX_LIVE_REQUESTS", "7")
    settings = read_settings(RouterSettings, [])
    assert (settings.workers, settings.max_live_requests) == (["x:1", "y:2"], 7)
    with pytest.raises(ConfigError, match="--max-live-requests"):
        read_settings(RouterSettings, ["--max-live-requests", "0"])
    settings = read_settings(RouterSettings, ["--caller-weights", "search=2,jobs=0.5", "--caller-weights", "a=b=3"])
    assert settings.caller_weights == {"search": 2.0, "jobs": 0.5, "a=b": 3.0}
    for wrong in ("search", "=2", "search=0", "search=much"):
        with pytest.raises(ConfigError, match="--caller-weights"):
            read_settings(RouterSettings, ["--caller-weights", wrong])


@pytest.mark.parametrize("flags", [[], ["--workers", "nonsense"], ["--workers", "a:1", "--listen", "127.0.0.1:99999"]])
def test_wrong_flags_end_with_one_line_and_code_two(flags: list[str]) -> None:
    command = [sys.executable, "-m", "router", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


async def test_port_in_use_is_said() -> None:
    async with serving() as service:
        flags = ["--listen", f"127.0.0.1:{service.router.port}", "--workers", "127.0.0.1:1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 2
        assert b"in use" in stderr


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with FakeCluster() as cluster:
        workers = [argument for address in cluster.addresses for argument in ("--workers", address)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--log-format", "json", *workers),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            address = ""
            models_ready = 0
            while not address or models_ready < 2:
                event = json.loads(await asyncio.wait_for(process.stderr.readline(), 30))
                address = event["address"] if event["event"] == "router ready" else address
                models_ready += event["event"] == "worker ready"
            go_on = cluster.prefill[0].script.stall("first_token")
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                running = stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=20)
                await cluster.prefill[0].script.reached("first_token").wait()
                process.terminate()
                while json.loads(await asyncio.wait_for(process.stderr.readline(), 30))["event"] != "draining":
                    pass
                error = await failing(stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=20))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                go_on.set()
                assert (await running).results
            await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 0
            await cluster.assert_idle()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


# --- what is too much -----------------------------------------------------------------------------

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def test_a_client_cannot_make_the_router_run_its_template() -> None:
    chat = {"messages": [generation_pb2.ChatMessage(role="user", content="Hi")], "chat_template": ENDLESS}
    async with serving() as service:
        calls = [service.generation.Chat(generation_pb2.ChatRequest(**chat), timeout=10) for _ in range(4)]
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        calls += [tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(**chat), timeout=10) for _ in range(40)]
        for call in calls:
            error = await failing(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in details(error)["BadRequest"].field_violations] == ["chat_template"]
        await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)


async def test_templates_of_trusted_clients_are_rendered() -> None:
    chat = {"messages": [generation_pb2.ChatMessage(role="user", content="Hi")], "chat_template": "say {{ 1 + 1 }}"}
    async with serving("--trust-request-chat-template") as service:
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        assert (await tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(**chat), timeout=10)).text == "say 2"
        await service.generation.Chat(generation_pb2.ChatRequest(**chat), timeout=10)


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"prompt": "x", "sampling": {"logit_bias": dict.fromkeys(range(2000), 1000.0)}}, "sampling.logit_bias"),
        ({"prompt": "x", "stopping": {"stop_token_ids": [1] * 2000}}, "stopping.stop_token_ids"),
        ({"prompt": "x", "stopping": {"stop": ["x"] * 2000}}, "stopping.stop"),
        ({"batch": {"prompts": [{"prompt": "x"}] * 2000}}, "batch.prompts"),
    ],
)
async def test_lists_that_no_request_needs_are_refused_by_their_length(
    request_fields: dict[str, Any], field: str
) -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(**request_fields)
        error = await failing(service.generation.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        violations = details(error)["BadRequest"].field_violations
        assert [violation.field for violation in violations] == [field]
        assert "at most 1024 entries, has 2000" in violations[0].description


async def test_a_message_above_the_limit_is_refused() -> None:
    async with serving("--max-message-bytes", "10000") as service:
        request = generation_pb2.GenerateRequest(prompt="x" * 20_000)
        error = await failing(service.generation.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=10)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with serving() as service:
        error = await failing(service.generation.Generate(generation_pb2.GenerateRequest(prompt="x" * 3_000_000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "3000000 characters" in error.details()


async def test_a_large_answer_is_converted_off_the_event_loop() -> None:
    """As a message with 20 alternatives for each of a thousand tokens takes tens of milliseconds."""
    threads: list[str] = []

    def to_proto(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return "message"

    top = tuple(TokenAlternative(token_id, -1.0) for token_id in range(20))
    token = ProducedToken(token_id=1, logprobs=TokenLogprobs(logprob=-1.0, rank=1, top=top))
    model = SimpleNamespace(tokenizer=SimpleNamespace(token_text=str))
    for num_tokens in (3, 1000):
        continuation = SimpleNamespace(joiner=MessageJoiner(), tokens=[token] * num_tokens, finish=None)
        answer: Any = SimpleNamespace(continuations=(continuation,), call=SimpleNamespace(model=model))
        assert await convert_answer(to_proto, answer, return_token_ids=False) == ["message"]
    assert threads[0] == threading.current_thread().name
    assert threads[1] != threads[0]
