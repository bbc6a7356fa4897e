"""Traces for a collector, in OpenTelemetry's protocol (OTLP over HTTP, as JSON): what GetTrace tells, for all requests.

Spans of workers are sent by the router, under the workers' names, as the router has them anyway: so workers need no way
to a collector. A collector that is slow or away costs nothing but its traces: they wait in a queue of bounded length.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.request
from collections import defaultdict
from typing import Any

import twinstage
from router.trace import ROUTER, RequestTrace
from twinstage.telemetry.log import get_logger
from twinstage.telemetry.trace_context import new_id

MAX_QUEUED = 2000  # traces; more are dropped
MAX_BATCH = 200
POST_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0  # at the end of the process
COMPLAIN_EVERY_S = 60.0
_SERVER, _INTERNAL = 2, 1  # SpanKind
_ERROR = 2  # StatusCode

logger = get_logger(__name__)


class TraceExporter:
    """Sends traces to `endpoint`, such as http://collector:4318, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(MAX_QUEUED)
        self._complained_s = float("-inf")
        self._thread = threading.Thread(target=self._work_off, name="trace export", daemon=True)
        self._thread.start()

    def add(self, trace: RequestTrace) -> None:
        """Send the trace of a request that has ended, unless its caller asked for none. Never waits."""
        if trace.context.sampled:
            try:
                self._queue.put_nowait(trace)
            except queue.Full:
                self._complain("the queue is full")

    def close(self) -> None:
        """Send what is there, for a moment, and end."""
        try:
            self._queue.put(None, timeout=FLUSH_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_TIMEOUT_S)

    def _work_off(self) -> None:
        is_ending = False
        while not is_ending:
            batch: list[RequestTrace | None] = [self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            is_ending = None in batch
            if traces := [trace for trace in batch if trace is not None]:
                self._post(json.dumps(to_otlp(traces)).encode())

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=POST_TIMEOUT_S) as answer:
                answer.read()
        # URLError and HTTPError are OSErrors; an answer that is no HTTP, as from a collector's gRPC port, is neither.
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("traces are lost", endpoint=self._url, error=why)


def to_otlp(traces: list[RequestTrace]) -> dict[str, Any]:
    """The traces as an ExportTraceServiceRequest, with the spans of each process under its name."""
    by_process: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for trace in traces:
        by_process[ROUTER].append(_root(trace))
        for span in trace.spans:
            attributes = {"twinstage.attempt": span.attempt, **({"error.message": span.error} if span.error else {})}
            by_process[span.process].append(
                _span(
                    trace,
                    name=span.name,
                    span_id=new_id(8),
                    parent_id=trace.context.span_id,
                    kind=_INTERNAL,
                    start_s=span.start_s,
                    duration_s=span.duration_s,
                    attributes=attributes,
                    failed=bool(span.error),
                )
            )
    return {"resourceSpans": [_of_process(process, spans) for process, spans in by_process.items()]}


def _root(trace: RequestTrace) -> dict[str, Any]:
    attributes = {"twinstage.request_id": trace.request_id, "twinstage.model": trace.model}
    if trace.error_reason:
        attributes["error.type"] = trace.error_reason
    return _span(
        trace,
        name="request",
        span_id=trace.context.span_id,
        parent_id=trace.context.parent_span_id,
        kind=_SERVER,
        start_s=0.0,
        duration_s=trace.duration_s or 0.0,
        attributes=attributes,
        failed=bool(trace.error_reason),
    )


def _span(
    trace: RequestTrace,
    *,
    name: str,
    span_id: str,
    parent_id: str,
    kind: int,
    start_s: float,
    duration_s: float,
    attributes: dict[str, Any],
    failed: bool,
) -> dict[str, Any]:
    start_ns = round((trace.arrived_at_s + start_s) * 1e9)
    span = {
        "traceId": trace.context.trace_id,
        "spanId": span_id,
        "parentSpanId": parent_id,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + round(duration_s * 1e9)),
        "attributes": _attributes(attributes),
    }
    return {**span, "status": {"code": _ERROR}} if failed else span


def _of_process(process: str, spans: list[dict[str, Any]]) -> dict[str, Any]:
    service = "twinstage-router" if process == ROUTER else "twinstage-worker"
    resource = {"service.name": service, "service.instance.id": process}
    scope = {"name": "twinstage", "version": twinstage.__version__}
    return {
        "resource": {"attributes": _attributes(resource)},
        "scopeSpans": [{"scope": scope, "spans": spans}],
    }


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]
