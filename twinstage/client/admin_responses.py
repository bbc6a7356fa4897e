"""From messages of AdminService that tell of load and of single requests to the client's results."""

from __future__ import annotations

from twinstage.client.results import Load, ModelLoad, RequestLoad, Trace, TraceSpan
from twinstage.rpc.convert_values import seconds_from_proto
from twinstage.v1 import admin_pb2


def load(message: admin_pb2.Load) -> Load:
    return Load(
        time_s=message.time.ToNanoseconds() / 1e9,
        generation=_request_load(message.generation),
        embedding=_request_load(message.embedding),
        models=tuple(map(_model_load, message.models)),
    )


def _request_load(message: admin_pb2.RequestLoad) -> RequestLoad:
    return RequestLoad(
        live=message.live, max_live=message.max_live, queued=message.queued, max_queued=message.max_queued
    )


def _model_load(message: admin_pb2.ModelLoad) -> ModelLoad:
    return ModelLoad(
        model=message.model,
        prefill_workers=message.prefill_workers,
        decode_workers=message.decode_workers,
        prefill_running=message.prefill_running,
        prefill_waiting=message.prefill_waiting,
        prefill_waiting_tokens=message.prefill_waiting_tokens,
        decode_running=message.decode_running,
        decode_waiting=message.decode_waiting,
        decode_total_kv_blocks=message.decode_total_kv_blocks,
        decode_free_kv_blocks=message.decode_free_kv_blocks,
    )


def trace(message: admin_pb2.Trace) -> Trace:
    return Trace(
        request_id=message.request_id,
        trace_id=message.trace_id,
        parent_span_id=message.parent_span_id,
        model=message.model,
        arrived_at_s=message.arrived_at.ToNanoseconds() / 1e9,
        duration_s=seconds_from_proto(message.duration) if message.HasField("duration") else None,
        error_reason=message.error_reason,
        spans=tuple(
            TraceSpan(
                name=span.name,
                process=span.process,
                start_s=seconds_from_proto(span.start),
                duration_s=seconds_from_proto(span.duration),
                attempt=span.attempt,
                error=span.error,
            )
            for span in message.spans
        ),
    )
