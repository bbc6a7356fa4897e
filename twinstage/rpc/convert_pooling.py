"""Conversion of what pooling models are asked for to the messages of `twinstage.worker.v1`, and back."""

from __future__ import annotations

from twinstage.types import PoolingInput, PoolingTask
from twinstage.worker.v1 import worker_pb2

_TASK_TO_PROTO = {
    PoolingTask.EMBED: worker_pb2.POOLING_TASK_EMBED,
    PoolingTask.TOKEN_EMBED: worker_pb2.POOLING_TASK_TOKEN_EMBED,
    PoolingTask.CLASSIFY: worker_pb2.POOLING_TASK_CLASSIFY,
    PoolingTask.SCORE: worker_pb2.POOLING_TASK_SCORE,
}
_TASK_FROM_PROTO = {value: key for key, value in _TASK_TO_PROTO.items()}


def worker_pooling_task_to_proto(task: PoolingTask) -> worker_pb2.PoolingTask.ValueType:
    return _TASK_TO_PROTO[task]


def worker_pooling_task_from_proto(task: int) -> PoolingTask | None:
    """None where the model's own task is meant. Raises ValueError for a task that this version does not know."""
    if task == worker_pb2.POOLING_TASK_UNSPECIFIED:
        return None
    if task not in _TASK_FROM_PROTO:
        raise ValueError(f"unknown pooling task {task}")
    return _TASK_FROM_PROTO[worker_pb2.PoolingTask.ValueType(task)]


def pooling_input_to_proto(entry: PoolingInput) -> worker_pb2.EncodeInput:
    return worker_pb2.EncodeInput(
        token_ids=entry.token_ids, token_type_ids=entry.token_type_ids, prompt_tokens=entry.prompt_tokens
    )


def pooling_input_from_proto(message: worker_pb2.EncodeInput) -> PoolingInput:
    return PoolingInput(
        token_ids=list(message.token_ids),
        token_type_ids=list(message.token_type_ids),
        prompt_tokens=message.prompt_tokens,
    )
