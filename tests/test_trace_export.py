"""Traces as a collector gets them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from router.trace import RequestTrace
from router.trace_export import TraceExporter
from served_router import failing, serving
from twinstage.telemetry.trace_context import continue_trace
from twinstage.v1 import generation_pb2

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes what is posted."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.posted.append((self.path, json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def spans_by_instance(collector: Collector) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path, body in collector.posted:
        assert path == "/v1/traces"
        for resource in body["resourceSpans"]:
            attributes = {entry["key"]: entry["value"]["stringValue"] for entry in resource["resource"]["attributes"]}
            found.setdefault(attributes["service.instance.id"], []).extend(resource["scopeSpans"][0]["spans"])
    return found


async def test_a_collector_gets_one_trace_of_three_processes(collector: Collector) -> None:
    async with serving("--otlp-endpoint", collector.url) as service:
        request = generation_pb2.GenerateRequest(prompt="Hello", request_id="mine")
        for flags in ("01", "00"):
            metadata = [("traceparent", f"00-{TRACE}-{SPAN}-{flags}")]
            await service.generation.Generate(request, timeout=10, metadata=metadata)
        long = generation_pb2.GenerateRequest(prompt="x" * 100)
        await failing(service.generation.Generate(long, timeout=10))
    found = spans_by_instance(collector)
    assert set(found) == {"router", "prefill-0", "decode-0"}
    mine = [span for spans in found.values() for span in spans if span["traceId"] == TRACE]
    (root,) = (span for span in mine if span["name"] == "request")
    assert root["parentSpanId"] == SPAN
    assert {span["parentSpanId"] for span in mine if span is not root} == {root["spanId"]}
    assert len({span["spanId"] for span in mine}) == len(mine) == 10, "the second call was not sampled"
    assert {span["name"] for span in found["decode-0"]} == {"reserve", "decode_queue", "decode"}
    start, end = int(root["startTimeUnixNano"]), int(root["endTimeUnixNano"])
    assert all(start <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in mine)
    assert all(int(span["endTimeUnixNano"]) <= end + 10**7 for span in mine)
    (failed,) = (span for span in found["router"] if span.get("status") == {"code": 2})
    assert {"key": "error.type", "value": {"stringValue": "INVALID_REQUEST"}} in failed["attributes"]


def test_a_collector_that_is_away_costs_nothing() -> None:
    exporter = TraceExporter("http://127.0.0.1:1")
    started_s = time.monotonic()
    for number in range(5000):
        exporter.add(RequestTrace(request_id=str(number), context=continue_trace(()), duration_s=0.1))
    assert time.monotonic() - started_s < 2
    exporter.close()
    assert time.monotonic() - started_s < 10


def test_what_does_not_speak_http_does_not_end_the_export() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        exporter = TraceExporter(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for number in range(2):
            exporter.add(RequestTrace(request_id=str(number), context=continue_trace(()), duration_s=0.1))
            connection, _ = listener.accept()  # the second time, too
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\n")  # how a gRPC server begins
        exporter.close()
