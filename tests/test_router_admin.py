"""The services of the router that compute nothing, and what operators see and do, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from fake_workers import until
from router.service import EMBEDDING_SERVICE, GENERATION_SERVICE
from served_router import Service, details, failing, serving
from twinstage.errors import Unavailable
from twinstage.types import WorkerLoad
from twinstage.v1 import (
    admin_pb2,
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)


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
        error = await failing(stub.GetModel(model_pb2.GetModelRequest()))  # of two models
        assert [violation.field for violation in details(error)["BadRequest"].field_violations] == ["name"]
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
        # Before anything was served, nobody knows how long those would wait that are not computed at once.
        assert (await service.admin.GetServerInfo(request)).max_live_requests == max(16, rows)
        stub: Any = generation_pb2_grpc.GenerationServiceStub(service.channel)
        await stub.Generate(generation_pb2.GenerateRequest(prompt="Hi", model="fake"))
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
