"""A client of another make: Node.js with @grpc/grpc-js streams an answer."""

from __future__ import annotations

import asyncio

from fake_generation import ANSWER, FakeGeneration, fake_server
from node_client import stream_answer


async def test_an_answer_is_streamed() -> None:
    async with fake_server(FakeGeneration()) as address:
        answer = await asyncio.to_thread(stream_answer, address, {"prompt": "Hello", "request_id": "from-node"})
    assert answer["status"]["name"] == "OK"
    assert answer["text"] == "".join(ANSWER)
    assert answer["order"] == ["prompt_info", "delta", "finished", "summary"]
    assert answer["events"]["delta"] == len(ANSWER)
    assert answer["prompt_info"]["request_id"] == "from-node"
    assert answer["finish_reason"] == "FINISH_REASON_STOP"
    assert answer["summary"]["usage"]["completion_tokens"] == len(ANSWER)


async def test_a_refusal_arrives_with_its_details() -> None:
    async with fake_server(FakeGeneration(capacity=0)) as address:
        answer = await asyncio.to_thread(stream_answer, address, {"prompt": "Hello"})
    assert answer["status"]["name"] == "RESOURCE_EXHAUSTED"
    assert {"grpc-status-details-bin", "grpc-retry-pushback-ms"} <= set(answer["status"]["metadata"])
    assert answer["text"] == ""


async def test_its_deadline_is_kept() -> None:
    async with fake_server(FakeGeneration(seconds=30)) as address:
        answer = await asyncio.to_thread(stream_answer, address, {"prompt": "Hello"}, deadline_s=0.5)
    assert answer["status"]["name"] == "DEADLINE_EXCEEDED"
