"""Loads and traces as messages."""

from __future__ import annotations

import time
from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from router.gate import Gate
from router.trace import RequestTrace, TraceSpan
from router.worker_entry import ServedModel
from twinstage.rpc.convert_public import seconds_to_proto
from twinstage.types import WorkerLoad
from twinstage.v1 import admin_pb2


def load_to_proto(models: Mapping[str, ServedModel], *, generation_gate: Gate, embedding_gate: Gate) -> admin_pb2.Load:
    """How much there is to do now."""
    return admin_pb2.Load(
        time=_time_to_proto(time.time()),
        generation=_gate_to_proto(generation_gate),
        embedding=_gate_to_proto(embedding_gate),
        models=[_model_to_proto(models[name]) for name in sorted(models)],
    )


def _gate_to_proto(gate: Gate) -> admin_pb2.RequestLoad:
    return admin_pb2.RequestLoad(live=gate.live, max_live=gate.max_live, queued=gate.queued, max_queued=gate.max_queued)


def _model_to_proto(model: ServedModel) -> admin_pb2.ModelLoad:
    prefill = [life.load or WorkerLoad() for life in model.prefill]
    decode = [life.load or WorkerLoad() for life in model.decode]
    return admin_pb2.ModelLoad(
        model=model.name,
        prefill_workers=len(prefill),
        decode_workers=len(decode),
        prefill_running=sum(load.running for load in prefill),
        prefill_waiting=sum(load.waiting for load in prefill),
        prefill_waiting_tokens=sum(load.waiting_tokens for load in prefill),
        decode_running=sum(load.running for load in decode),
        decode_waiting=sum(load.waiting for load in decode),
        decode_total_kv_blocks=sum(life.description.total_kv_blocks for life in model.decode),
        decode_free_kv_blocks=sum(load.free_kv_blocks for load in decode),
    )


def trace_to_proto(trace: RequestTrace) -> admin_pb2.Trace:
    """What is known of a request."""
    message = admin_pb2.Trace(
        request_id=trace.request_id,
        trace_id=trace.context.trace_id,
        parent_span_id=trace.context.parent_span_id,
        model=trace.model,
        arrived_at=_time_to_proto(trace.arrived_at_s),
        error_reason=trace.error_reason,
        spans=[_span_to_proto(span) for span in trace.spans],
    )
    if trace.duration_s is not None:
        message.duration.CopyFrom(seconds_to_proto(trace.duration_s))
    return message


def _span_to_proto(span: TraceSpan) -> admin_pb2.TraceSpan:
    return admin_pb2.TraceSpan(
        name=span.name,
        process=span.process,
        start=seconds_to_proto(span.start_s),
        duration=seconds_to_proto(span.duration_s),
        attempt=span.attempt,
        error=span.error,
    )


def _time_to_proto(seconds: float) -> Timestamp:
    """Seconds since the epoch."""
    message = Timestamp()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
