"""Metrics: what /metrics tells after some requests, and that they cost nothing where nobody asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hostile
from harness import wait_until
from router import metrics_server
from router.__main__ import Router
from router.config import RouterSettings
from router.metrics import Metrics
from served_router import failing, serving
from twinstage.errors import ConfigError
from twinstage.settings import read_settings
from twinstage.v1 import common_pb2, generation_pb2

PAGE = Path(__file__).resolve().parent.parent / "docs" / "observe.md"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_requests_and_workers_are_measured() -> None:
    async with serving("--metrics-listen", "127.0.0.1:0") as service:
        request = generation_pb2.GenerateRequest(prompt="Hello", stopping=common_pb2.StoppingOptions(max_tokens=5))
        await service.generation.Generate(request, timeout=10)
        _ = [event async for event in service.generation.GenerateStream(request, timeout=10)]
        await failing(service.generation.Generate(generation_pb2.GenerateRequest(), timeout=10))
        samples = await asyncio.to_thread(read, service.router.metrics_port)
    method = {"grpc_service": "twinstage.v1.GenerationService", "grpc_method": "Generate"}
    assert value(samples, "grpc_server_handled_total", **method, grpc_code="OK") == 1
    assert value(samples, "grpc_server_handled_total", **method, grpc_code="INVALID_ARGUMENT") == 1
    assert value(samples, "grpc_server_handling_seconds_count", **method) == 2
    for name in ("time_to_first_token", "queue", "tokenize", "prefill", "kv_transfer", "decode", "request"):
        assert value(samples, f"twinstage_{name}_seconds_count", model="fake") == 2, name
    assert value(samples, "twinstage_inter_token_seconds_count", model="fake") == 8
    assert value(samples, "twinstage_prompt_tokens_total", model="fake") == 10
    assert value(samples, "twinstage_generated_tokens_total", model="fake") == 10
    assert value(samples, "twinstage_requests_finished_total", model="fake", reason="LENGTH") == 2
    assert value(samples, "twinstage_requests_live", kind="generate") == 0
    decode = {"worker": "decode-0", "role": "decode", "model": "fake"}
    total = value(samples, "twinstage_worker_kv_blocks", **decode)
    assert value(samples, "twinstage_worker_kv_blocks_free", **decode) == total > 0
    assert value(samples, "twinstage_worker_kv_blocks_leaked", **decode) == 0
    for name in ("kv_received_bytes_total", "prefix_blocks_queried_total", "prefix_blocks_hit_total"):
        assert value(samples, f"twinstage_worker_{name}", **decode) >= 0


def test_the_port_survives_what_no_reader_sends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither who says nothing nor who says too much takes threads or connections from the router for long."""
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 0.2)
    metrics = Metrics({"/a.B/C"})
    metrics.handled("/a.B/C", "OK", 0.1)
    server = metrics_server.MetricsServer(metrics, "127.0.0.1:0")
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10)) for _ in range(40)
        ]
        for connection in silent[24:]:
            assert connection.recv(1) == b"", "closed, as there is no place"
        # A thread for each of the others, and one that ends it.
        assert threading.active_count() <= before + 2 * metrics_server.MAX_CONNECTIONS
        for connection in silent[: metrics_server.MAX_CONNECTIONS]:
            assert connection.recv(1) == b"", "its time is over"
        for attack in (hostile.tls, hostile.noise, hostile.http1, hostile.endless_headers):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                hostile.begin(connection, attack)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets it
        wait_until(lambda: threading.active_count() <= before, timeout_s=10, what="an end of all")
        monkeypatch.setattr(metrics_server, "CONNECTION_S", 10.0)
        method = {"grpc_service": "a.B", "grpc_method": "C", "grpc_code": "OK"}
        assert value(read(server.port), "grpc_server_handled_total", **method) == 1
    server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_methods_that_nobody_serves_are_no_labels() -> None:
    metrics = Metrics({"/a.B/C"})
    for name in ("/a.B/C", "/x.Y/1", "/x.Y/2"):
        metrics.handled(name, "OK", 0.1)
    (family,) = (family for family in metrics.registry.collect() if family.name == "grpc_server_handled")
    methods = {sample.labels["grpc_method"] for sample in family.samples}
    assert methods == {"C", "other"}


async def test_a_port_in_use_is_said() -> None:
    async with serving("--metrics-listen", "127.0.0.1:0", embed=0) as service:
        taken = service.router.metrics_port
        flags = ["--listen", "127.0.0.1:0", "--workers", "127.0.0.1:1", "--metrics-listen", f"127.0.0.1:{taken}"]
        router = Router(read_settings(RouterSettings, flags))
        with pytest.raises(ConfigError, match=f"--metrics-listen 127.0.0.1:{taken}"):
            await router.start()
        await router.stop()


def test_without_metrics_their_library_is_not_imported() -> None:
    program = "import sys, router.__main__; assert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_the_page_lists_every_metric() -> None:
    async with serving("--metrics-listen", "127.0.0.1:0", embed=0) as service:
        request = generation_pb2.GenerateRequest(prompt="Hello")
        await service.generation.Generate(request, timeout=10)
        samples = await asyncio.to_thread(read, service.router.metrics_port)
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples if not name.endswith("_created")}
    listed = set(re.findall(r"`((?:grpc_server|twinstage)_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert listed == names
