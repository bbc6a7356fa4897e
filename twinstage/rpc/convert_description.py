"""Conversion of what workers say of themselves: their descriptions and loads, as `convert_worker` converts requests."""

from __future__ import annotations

from twinstage.types import ModelDescription, Role, Task, WorkerDescription, WorkerId, WorkerLoad
from twinstage.worker.v1 import worker_pb2

_ROLE_TO_PROTO = {Role.PREFILL: worker_pb2.ROLE_PREFILL, Role.DECODE: worker_pb2.ROLE_DECODE}
_ROLE_FROM_PROTO = {value: key for key, value in _ROLE_TO_PROTO.items()}
_TASK_TO_PROTO = {
    Task.GENERATE: worker_pb2.TASK_GENERATE,
    Task.EMBED: worker_pb2.TASK_EMBED,
    Task.SCORE: worker_pb2.TASK_SCORE,
    Task.CLASSIFY: worker_pb2.TASK_CLASSIFY,
}
_TASK_FROM_PROTO = {value: key for key, value in _TASK_TO_PROTO.items()}


def model_description_to_proto(model: ModelDescription) -> worker_pb2.ModelInfo:
    return worker_pb2.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        task=_TASK_TO_PROTO[model.task],
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        embedding_dimensions=model.embedding_dimensions,
        token_dimensions=model.token_dimensions,
        labels=model.labels,
    )


def model_description_from_proto(message: worker_pb2.ModelInfo) -> ModelDescription:
    if message.task not in _TASK_FROM_PROTO:
        raise ValueError(f"unknown task {message.task}")
    return ModelDescription(
        name=message.name,
        fingerprint=message.fingerprint,
        task=_TASK_FROM_PROTO[message.task],
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        embedding_dimensions=message.embedding_dimensions,
        token_dimensions=message.token_dimensions,
        labels=tuple(message.labels),
    )


def worker_description_to_proto(description: WorkerDescription) -> worker_pb2.DescribeResponse:
    return worker_pb2.DescribeResponse(
        protocol_version=description.protocol_version,
        worker_id=description.worker_id,
        epoch=description.epoch,
        role=_ROLE_TO_PROTO[description.role],
        model=model_description_to_proto(description.model),
        kv_layout_fingerprint=description.kv_layout_fingerprint,
        total_kv_blocks=description.total_kv_blocks,
        kv_block_size=description.kv_block_size,
        kv_block_bytes=description.kv_block_bytes,
        max_num_sequences=description.max_num_sequences,
        transports=description.transports,
        numerics=description.numerics,
    )


def worker_description_from_proto(message: worker_pb2.DescribeResponse) -> WorkerDescription:
    if message.role not in _ROLE_FROM_PROTO:
        raise ValueError(f"unknown role {message.role}")
    return WorkerDescription(
        protocol_version=message.protocol_version,
        worker_id=WorkerId(message.worker_id),
        epoch=message.epoch,
        role=_ROLE_FROM_PROTO[message.role],
        model=model_description_from_proto(message.model),
        kv_layout_fingerprint=message.kv_layout_fingerprint,
        total_kv_blocks=message.total_kv_blocks,
        kv_block_size=message.kv_block_size,
        kv_block_bytes=message.kv_block_bytes,
        max_num_sequences=message.max_num_sequences,
        transports=tuple(message.transports),
        numerics=message.numerics,
    )


def worker_load_to_proto(load: WorkerLoad) -> worker_pb2.WatchLoadResponse:
    return worker_pb2.WatchLoadResponse(
        free_kv_blocks=load.free_kv_blocks,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        finished=load.finished,
        kv_bytes_received=load.kv_bytes_received,
        draining=load.draining,
        cached_kv_blocks=load.cached_kv_blocks,
        prefix_looked_up_blocks=load.prefix_looked_up_blocks,
        prefix_found_blocks=load.prefix_found_blocks,
        unfinished=load.unfinished,
        leaked_kv_blocks=load.leaked_kv_blocks,
    )


def worker_load_from_proto(message: worker_pb2.WatchLoadResponse) -> WorkerLoad:
    return WorkerLoad(
        free_kv_blocks=message.free_kv_blocks,
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        finished=message.finished,
        kv_bytes_received=message.kv_bytes_received,
        draining=message.draining,
        cached_kv_blocks=message.cached_kv_blocks,
        prefix_looked_up_blocks=message.prefix_looked_up_blocks,
        prefix_found_blocks=message.prefix_found_blocks,
        unfinished=message.unfinished,
        leaked_kv_blocks=message.leaked_kv_blocks,
    )
