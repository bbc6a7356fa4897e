"""Conversion of models and workers to the messages of `twinstage.v1` that list them."""

from __future__ import annotations

from collections.abc import Iterable

from twinstage.types import ModelDescription, Role, Task, WorkerDescription, WorkerLoad
from twinstage.v1 import admin_pb2, model_pb2

_TASK_TO_PROTO = {
    Task.GENERATE: model_pb2.MODEL_TASK_GENERATE,
    Task.EMBED: model_pb2.MODEL_TASK_EMBED,
    Task.SCORE: model_pb2.MODEL_TASK_SCORE,
    Task.CLASSIFY: model_pb2.MODEL_TASK_CLASSIFY,
}
_ROLE_TO_PROTO = {Role.PREFILL: admin_pb2.WORKER_ROLE_PREFILL, Role.DECODE: admin_pb2.WORKER_ROLE_DECODE}


def model_to_proto(
    model: ModelDescription,
    *,
    prefill_workers: int,
    decode_workers: int,
    ready: bool,
    deterministic: bool,
    capabilities: Iterable[str] = (),
) -> model_pb2.Model:
    """`capabilities` are names of ModelCapability in small letters."""
    return model_pb2.Model(
        name=model.name,
        task=_TASK_TO_PROTO[model.task],
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        fingerprint=model.fingerprint,
        embedding_dimensions=model.embedding_dimensions,
        labels=model.labels,
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        ready=ready,
        deterministic=deterministic,
        capabilities=sorted(
            model_pb2.ModelCapability.Value(f"MODEL_CAPABILITY_{name.upper()}") for name in capabilities
        ),
    )


def worker_to_proto(
    description: WorkerDescription | None, load: WorkerLoad | None, *, address: str, state: str, detail: str = ""
) -> admin_pb2.Worker:
    """`description` and `load` are None until the worker was reached; `state` is a WorkerState in small letters."""
    worker = admin_pb2.Worker(
        address=address, state=admin_pb2.WorkerState.Value(f"WORKER_STATE_{state.upper()}"), detail=detail
    )
    if description is not None:
        worker.id = description.worker_id
        worker.role = _ROLE_TO_PROTO[description.role]
        worker.model = description.model.name
        worker.total_kv_blocks = description.total_kv_blocks
        worker.transports.extend(description.transports)
        worker.numerics = description.numerics
    if load is not None:
        worker.free_kv_blocks = load.free_kv_blocks
        worker.running = load.running
        worker.waiting = load.waiting
        worker.finished = load.finished
        worker.kv_bytes_received = load.kv_bytes_received
        worker.cached_kv_blocks = load.cached_kv_blocks
        worker.prefix_looked_up_blocks = load.prefix_looked_up_blocks
        worker.prefix_found_blocks = load.prefix_found_blocks
        worker.unfinished = load.unfinished
        worker.leaked_kv_blocks = load.leaked_kv_blocks
    return worker
