"""Traces: whose they are, what they tell of a request, and how many are kept."""

from __future__ import annotations

import itertools
from typing import Any

import grpc
import pytest

from harness import ProcessCluster
from router.trace import MAX_SPANS, RequestTrace, Traces
from served_router import failing, serving
from twinstage.errors import (
    AlreadyExists,
    ComputeFailed,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    WorkerLost,
)
from twinstage.lifecycle import Failed, PrefillPhase
from twinstage.rpc.convert_worker import sequence_spec_from_proto, sequence_spec_to_proto
from twinstage.telemetry.ends import log_end
from twinstage.telemetry.trace_context import continue_trace, set_current_trace, trace_id_of
from twinstage.types import RequestId, Role, SamplingParameters, SequenceSpec
from twinstage.v1 import admin_pb2, common_pb2, embedding_pb2, generation_pb2

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header", [HEADER, f"  {HEADER} ", f"00-{TRACE}-{SPAN}-ff", f"42-{TRACE}-{SPAN}-01-what-comes-later"]
)
def test_a_trace_is_continued(header: str) -> None:
    context = continue_trace([header])
    assert (context.trace_id, context.parent_span_id, context.sampled) == (TRACE, SPAN, True)
    assert context.span_id not in {SPAN, "0" * 16}
    assert context.traceparent == f"00-{TRACE}-{context.span_id}-01"
    assert trace_id_of(context.traceparent) == TRACE


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        [b"\x00"],
        [HEADER.upper()],
        [HEADER[:-1]],
        [f"{HEADER}-more"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [HEADER, HEADER],
        [HEADER + "-" + "x" * 1000],
    ],
)
def test_what_is_no_traceparent_begins_a_new_trace(headers: list[str | bytes]) -> None:
    first, second = continue_trace(headers), continue_trace(headers)
    assert first.trace_id != second.trace_id
    assert TRACE not in (first.trace_id, second.trace_id)
    assert not first.parent_span_id
    assert not continue_trace([f"00-{TRACE}-{SPAN}-00"]).sampled


def test_the_last_traces_are_kept_and_those_in_progress() -> None:
    traces = Traces(max_ended=2)
    live = traces.begin("live")
    for name in "abc":
        traces.end(traces.begin(name))
    assert traces.find("live") is live
    assert [traces.find(name).request_id for name in "bc"] == ["b", "c"]
    with pytest.raises(NotFound, match="'a'"):
        traces.find("a")
    traces.end(traces.begin("b"))  # the same id again
    traces.end(traces.begin("d"))
    assert traces.find("b").request_id == "b"
    with pytest.raises(NotFound):
        traces.find("c")


def test_a_refusal_is_remembered_but_not_in_place_of_what_is_in_progress() -> None:
    traces = Traces(max_ended=2)
    live = traces.begin("live")
    set_current_trace(continue_trace(()))  # another call
    traces.refused("live", QuotaExceeded("too much"))
    assert traces.find("live") is live
    in_use = AlreadyExists("in use", resource_type="request", resource_name="r")
    for error in (in_use, Unauthenticated("no token"), PermissionDenied("no right")):
        traces.refused("r", error)
        with pytest.raises(NotFound):
            traces.find("r")
    traces.refused("r", QuotaExceeded("too much"))
    assert traces.find("r").error_reason == "QUOTA_EXCEEDED"
    assert traces.find("r").duration_s is not None


def test_a_trace_is_bounded_and_ends() -> None:
    trace = RequestTrace(request_id="r", context=continue_trace(()))
    for _ in range(2 * MAX_SPANS):
        trace.ended_now("decode", 1e9)
    assert len(trace.spans) == MAX_SPANS
    assert trace.spans[0].start_s == 0.0, "no span begins before the request"
    trace.end()
    duration_s = trace.duration_s
    trace.end()
    assert trace.duration_s == duration_s


async def trace_of(service: Any, request_id: str) -> admin_pb2.Trace:
    return (await service.admin.GetTrace(admin_pb2.GetTraceRequest(request_id=request_id), timeout=10)).trace


def seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def test_a_span_lies_within_its_request_whatever_a_worker_says() -> None:
    trace = RequestTrace(request_id="r", context=continue_trace(()))
    for duration_s, ago_s in ((3600.0, 0.0), (-1.0, 0.0), (0.001, 3600.0), (3600.0, 3600.0)):
        trace.ended_now("prefill", duration_s, process="prefill-0", ago_s=ago_s)
    trace.end()
    assert trace.duration_s is not None
    assert len(trace.spans) == 4
    for span in trace.spans:
        assert span.start_s >= 0
        assert span.duration_s >= 0
        assert span.start_s + span.duration_s <= trace.duration_s


async def test_refused_requests_are_told_too() -> None:
    """By the door, by admission, for the model, and those that fail later: each once, as its client learned it."""
    refused: dict[str, tuple[dict[str, Any], str]] = {
        "door": ({"prompt": "a", "stopping": {"stop": ["b"] * 5000}}, "INVALID_REQUEST"),
        "fields": ({"prompt": "a", "sampling": {"top_p": 7.0}}, "INVALID_REQUEST"),
        "model": ({"prompt": "a", "model": "none"}, "NOT_FOUND"),
        "length": ({"prompt_token_ids": {"ids": [1] * 5000}}, "INVALID_REQUEST"),
    }
    async with serving() as service:
        for request_id, (fields, reason) in refused.items():
            request = generation_pb2.GenerateRequest(request_id=request_id, **fields)
            await failing(service.generation.Generate(request, timeout=10, metadata=[("traceparent", HEADER)]))
            trace = await trace_of(service, request_id)
            assert (trace.error_reason, trace.trace_id) == (reason, TRACE), request_id
            assert trace.HasField("duration")
        await failing(service.embedding.Embed(embedding_pb2.EmbedRequest(request_id="none"), timeout=10))
        assert (await trace_of(service, "none")).error_reason == "INVALID_REQUEST"
        # Who asks about a request, or wants to end it, displaces its trace in no way.
        for call in (
            admin_pb2.GetTraceRequest(request_id="nobody"),
            admin_pb2.AbortRequestRequest(request_id="none"),
        ) * 2:
            name = type(call).__name__.removesuffix("Request")
            assert (await failing(getattr(service.admin, name)(call, timeout=10))).code() is grpc.StatusCode.NOT_FOUND
        assert (await trace_of(service, "none")).error_reason == "INVALID_REQUEST"


async def test_a_request_is_told_from_arrival_to_end() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(
            prompt="Hello", request_id="mine", stopping=common_pb2.StoppingOptions(max_tokens=4)
        )
        await service.generation.Generate(request, timeout=10, metadata=[("traceparent", HEADER)])
        trace = await trace_of(service, "mine")
        assert (trace.trace_id, trace.parent_span_id, trace.model) == (TRACE, SPAN, "fake")
        assert not trace.error_reason
        told = [(span.name, span.process, span.attempt) for span in trace.spans]
        assert told == [
            ("queue", "router", 0),
            ("tokenize", "router", 0),
            ("reserve", "decode-0", 1),
            ("prefill_queue", "prefill-0", 1),
            ("prefill", "prefill-0", 1),
            ("first_token", "router", 1),
            ("kv_transfer", "prefill-0", 1),
            ("decode_queue", "decode-0", 1),
            ("decode", "decode-0", 1),
        ]
        ends = [seconds(span.start) + seconds(span.duration) for span in trace.spans]
        assert all(end <= seconds(trace.duration) + 0.001 for end in ends)
        moments = {span.name: seconds(span.start) + seconds(span.duration) for span in trace.spans}
        order = ("queue", "tokenize", "reserve", "prefill", "first_token", "kv_transfer", "decode")
        assert all(moments[a] <= moments[b] + 0.001 for a, b in itertools.pairwise(order))
        (spec,) = service.generators.prefill[0].specs
        assert trace_id_of(spec.traceparent) == TRACE


async def test_a_failed_attempt_and_a_failed_request_are_told() -> None:
    async with serving("--worker-wait", "0.1", prefill=2) as service:
        for worker in service.generators.prefill:
            worker.script.fail("first_token", ComputeFailed("no numbers"))
        request = generation_pb2.GenerateRequest(prompt="Hello", request_id="mine")
        await service.generation.Generate(request, timeout=10)
        trace = await trace_of(service, "mine")
        failed = [span for span in trace.spans if span.name == "attempt"]
        assert [(span.attempt, span.error.partition(":")[0]) for span in failed] == [
            (1, "COMPUTE_FAILED"),
            (2, "COMPUTE_FAILED"),
        ]
        assert trace.spans[-1].attempt == 3
        long = generation_pb2.GenerateRequest(prompt="x" * 100, request_id="long")
        await failing(service.generation.Generate(long, timeout=10))
        assert (await trace_of(service, "long")).error_reason == "INVALID_REQUEST"


async def test_requests_in_progress_embeddings_and_unknown_ones() -> None:
    async with serving() as service:
        going_on = service.generators.decode[0].script.stall("decode 3")
        call = service.generation.GenerateStream(
            generation_pb2.GenerateRequest(prompt="Hello", request_id="live"), timeout=10
        )
        async for event in call:
            if event.WhichOneof("event") == "delta" and not going_on.is_set():
                trace = await trace_of(service, "live")
                assert not trace.HasField("duration")
                assert "prefill" in {span.name for span in trace.spans}
                going_on.set()
        await service.embedding.Embed(embedding_pb2.EmbedRequest(texts=["a"], request_id="vectors"), timeout=10)
        spans = (await trace_of(service, "vectors")).spans
        assert [(span.name, span.process) for span in spans] == [
            ("queue", "router"),
            ("tokenize", "router"),
            ("encode", "embed-prefill-0"),
        ]
        for name, code in (("nobody", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.INVALID_ARGUMENT)):
            error = await failing(service.admin.GetTrace(admin_pb2.GetTraceRequest(request_id=name), timeout=10))
            assert error.code() is code


def test_workers_log_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    spec = SequenceSpec(
        request_id=RequestId("r#1"),
        prompt_token_ids=(1,),
        sampling=SamplingParameters(),
        max_tokens=1,
        traceparent=HEADER,
    )
    assert sequence_spec_from_proto(sequence_spec_to_proto(spec)) == spec
    log_end(Role.PREFILL, spec, phase=PrefillPhase.SENDING, outcome=Failed(WorkerLost("gone")))
    shown = capsys.readouterr()
    assert TRACE in shown.out + shown.err


@pytest.mark.xdist_group("tiny")
def test_three_real_processes_have_one_trace(tiny_cluster: ProcessCluster) -> None:
    from twinstage.client import Options, Stopping, TwinstageClient

    with TwinstageClient(tiny_cluster.address) as client:
        answer = client.generate("Hello", Options(stopping=Stopping(max_tokens=6, ignore_eos=True)))
        trace = client.trace(answer.request_id)
        placement = answer.summary.placement
    where = {span.name: span.process for span in trace.spans}
    assert where["tokenize"] == "router"
    assert where["prefill"] == placement.prefill_worker
    assert where["decode"] == placement.decode_worker
    assert trace.duration_s is not None
    assert all(0 <= span.start_s <= span.start_s + span.duration_s < trace.duration_s + 0.01 for span in trace.spans)
