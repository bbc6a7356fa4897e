"""GetLoad and WatchLoad."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from served_router import failing, serving
from twinstage.v1 import admin_pb2, generation_pb2


async def test_the_load_is_told_as_it_is() -> None:
    async with serving("--max-live-requests", "1", "--max-queued-requests", "7") as service:
        before = (await service.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=10)).load
        assert abs(before.time.ToNanoseconds() / 1e9 - time.time()) < 10
        assert (before.generation.live, before.generation.max_live, before.generation.max_queued) == (0, 1, 7)
        assert [model.model for model in before.models] == ["embedder", "fake"]
        fake = before.models[1]
        assert (fake.prefill_workers, fake.decode_workers) == (1, 1)
        assert fake.decode_free_kv_blocks == fake.decode_total_kv_blocks > 0
        going_on = service.generators.prefill[0].script.stall("first_token")
        calls = [
            asyncio.ensure_future(service.generation.Generate(generation_pb2.GenerateRequest(prompt="Hi"), timeout=10))
            for _ in range(3)
        ]
        async for response in service.admin.WatchLoad(admin_pb2.WatchLoadRequest(interval=Duration(nanos=10**8))):
            if (response.load.generation.live, response.load.generation.queued) == (1, 2):
                break
        going_on.set()
        await asyncio.gather(*calls)
        after = (await service.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=10)).load
        assert (after.generation.live, after.generation.queued) == (0, 0)


async def test_a_watch_keeps_its_interval_and_ends_with_the_router() -> None:
    async with serving() as service:
        watch = service.admin.WatchLoad(admin_pb2.WatchLoadRequest(interval=Duration(nanos=10**8)))
        times = [(await watch.read()).load.time.ToNanoseconds() / 1e9 for _ in range(3)]
        assert times[2] - times[0] >= 0.19
        service.router._draining.set()
        while (response := await watch.read()) is not grpc.aio.EOF:
            assert response.load.models
        assert await watch.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("interval", [Duration(), Duration(nanos=10**7), Duration(seconds=-1), Duration(seconds=4000)])
async def test_intervals_have_a_range(interval: Duration) -> None:
    async with serving(embed=0) as service:
        call = service.admin.WatchLoad(admin_pb2.WatchLoadRequest(interval=interval), timeout=10)
        error = await failing(call.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "interval" in (error.details() or "")
