"""What other people's tools do with the real system: ghz, Node.js, a strict health checker, `buf curl`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ghz_contract import run_ghz
from harness import ProcessCluster
from node_client import stream_answer
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("demo")]

QUESTION = "What is the capital of France?"
PROMPT = "The capital of France is"


def test_ghz_two_hundred_calls_at_fifty_at_a_time(demo_cluster: ProcessCluster) -> None:
    """On the real model: no failure other than RESOURCE_EXHAUSTED with RetryInfo within the deadline of 20 s."""
    report = asyncio.run(run_ghz(demo_cluster.address, total=200, concurrency=50, timeout_s=20))
    report.assert_kept()
    assert report.total == 200
    assert report.codes["OK"] >= 50, report.codes
    assert report.reflection_version == "v1"
    assert {"twinstage.v1.GenerationService", "grpc.health.v1.Health"} <= set(report.services)
    demo_cluster.wait_idle()


def test_node_streams_the_same_answer(demo_cluster: ProcessCluster) -> None:
    sampling = {"temperature": 0}
    stopping = {"max_tokens": 24}
    answer = stream_answer(demo_cluster.address, {"prompt": PROMPT, "sampling": sampling, "stopping": stopping})
    assert answer["status"]["name"] == "OK"
    request = generation_pb2.GenerateRequest(
        prompt=PROMPT,
        sampling=common_pb2.SamplingOptions(temperature=0.0),
        stopping=common_pb2.StoppingOptions(max_tokens=24),
    )
    with demo_cluster.channel() as channel:
        expected = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    assert answer["text"] == expected.results[0].text != ""
    assert answer["events"]["summary"] == 1


def test_chat_answers_the_question(demo_cluster: ProcessCluster) -> None:
    request = generation_pb2.ChatRequest(
        messages=[generation_pb2.ChatMessage(role="user", content=QUESTION)],
        sampling=common_pb2.SamplingOptions(temperature=0.0),
    )
    with demo_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        unary = stub.Chat(request, timeout=60)
        streamed = "".join(event.delta.text for event in stub.ChatStream(request, timeout=60))
    assert "Paris" in unary.results[0].message.content
    assert unary.results[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert streamed == unary.results[0].message.content


def test_every_service_is_healthy(demo_cluster: ProcessCluster) -> None:
    with demo_cluster.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "twinstage.v1.GenerationService", "twinstage.v1.EmbeddingService"):
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert response.status == health_pb2.HealthCheckResponse.SERVING, service


def test_buf_curl_needs_no_proto_files(demo_cluster: ProcessCluster) -> None:
    """What a user of grpcurl does: the schema comes from reflection."""
    buf = str(Path(sys.executable).with_name("buf"))
    url = f"http://{demo_cluster.address}/twinstage.v1.GenerationService/Generate"
    data = '{"prompt":"Hello","stopping":{"maxTokens":4}}'
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", data, url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["usage"]["completionTokens"] <= 4
