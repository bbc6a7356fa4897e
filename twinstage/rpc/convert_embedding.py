"""Conversion between domain types and the embedding messages of `twinstage.v1`, on the router's side.

Requests are kept as they are, for admission to judge; InvalidRequest is raised only for an enumeration value that this
version does not know.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.rpc.convert_values import optional_from_proto
from twinstage.types import (
    EmbeddingFormat,
    PoolingParameters,
    PoolingTask,
    RawEncodeRequest,
    TextPrompt,
    TokenPrompt,
    Truncation,
)
from twinstage.v1 import embedding_pb2

_FORMAT_FROM_PROTO = {
    embedding_pb2.EMBEDDING_FORMAT_UNSPECIFIED: EmbeddingFormat.FLOAT,
    embedding_pb2.EMBEDDING_FORMAT_FLOAT: EmbeddingFormat.FLOAT,
    embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32: EmbeddingFormat.PACKED_FLOAT32,
    embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT16: EmbeddingFormat.PACKED_FLOAT16,
}
_TASK_FROM_PROTO = {
    embedding_pb2.POOLING_TASK_UNSPECIFIED: None,
    embedding_pb2.POOLING_TASK_EMBED: PoolingTask.EMBED,
    embedding_pb2.POOLING_TASK_TOKEN_EMBED: PoolingTask.TOKEN_EMBED,
    embedding_pb2.POOLING_TASK_CLASSIFY: PoolingTask.CLASSIFY,
}
_TASK_TO_PROTO = {value: key for key, value in _TASK_FROM_PROTO.items()}
_SIDES = frozenset(embedding_pb2.TruncationSide.values())


def pooling_task_to_proto(task: PoolingTask | None) -> embedding_pb2.PoolingTask.ValueType:
    """None is the model's own. Raises ValueError for SCORE, which takes pairs."""
    if task not in _TASK_TO_PROTO:
        raise ValueError(f"the task {task.value if task else task} takes pairs of texts: call score")
    return _TASK_TO_PROTO[task]


def encode_request_from_proto(request: embedding_pb2.EncodeRequest) -> RawEncodeRequest:
    """Raises InvalidRequest for enumeration values that this version does not know."""
    _check_enumerations(request, has_task=True)
    own = _parameters_from_proto(request, "")
    return RawEncodeRequest(
        inputs=tuple(_encode_input_from_proto(entry) for entry in request.inputs),
        model=request.model,
        request_id=request.request_id,
        task=own.task,
        parameters=tuple(
            own.over(_parameters_from_proto(entry, f"parameters[{index}]."))
            for index, entry in enumerate(request.parameters)
        ),
        **_vector_options(request),
    )


def embed_request_from_proto(request: embedding_pb2.EmbedRequest) -> RawEncodeRequest:
    """Raises InvalidRequest for enumeration values that this version does not know."""
    _check_enumerations(request, has_task=False)
    return RawEncodeRequest(
        inputs=tuple(TextPrompt(text=text) for text in request.texts),
        inputs_field="texts",
        model=request.model,
        request_id=request.request_id,
        task=PoolingTask.EMBED,
        **_vector_options(request),
    )


def encode_stream_request_from_proto(request: embedding_pb2.EncodeStreamRequest) -> RawEncodeRequest:
    """Raises InvalidRequest for enumeration values that this version does not know."""
    _check_enumerations(request, has_task=True)
    return RawEncodeRequest(
        inputs=(_encode_input_from_proto(request.input),),
        inputs_field="input",
        model=request.model,
        task=_TASK_FROM_PROTO[request.task],
        **_vector_options(request),
    )


def _parameters_from_proto(
    message: embedding_pb2.EncodeRequest | embedding_pb2.EncodeParameters, prefix: str
) -> PoolingParameters:
    violations = []
    if message.task not in _TASK_FROM_PROTO:
        violations.append(FieldViolation(f"{prefix}task", f"unknown value {message.task}"))
    if message.truncation.side not in _SIDES:
        violations.append(_unknown_side(message.truncation, prefix))
    if violations:
        raise InvalidRequest(violations)
    return PoolingParameters(
        task=_TASK_FROM_PROTO[message.task],
        truncation=truncation_from_proto(message.truncation) if message.HasField("truncation") else None,
        normalize=optional_from_proto(message, "normalize"),
        dimensions=optional_from_proto(message, "dimensions"),
        prompt_name=optional_from_proto(message, "prompt_name"),
    )


_VectorRequest = embedding_pb2.EncodeRequest | embedding_pb2.EmbedRequest | embedding_pb2.EncodeStreamRequest


def _vector_options(request: _VectorRequest) -> dict[str, Any]:
    return {
        "truncation": truncation_from_proto(request.truncation),
        "normalize": request.normalize if request.HasField("normalize") else True,
        "dimensions": optional_from_proto(request, "dimensions"),
        "prompt_name": optional_from_proto(request, "prompt_name"),
        "format": _FORMAT_FROM_PROTO[request.format],
    }


def _check_enumerations(request: Any, *, has_task: bool) -> None:
    violations = []
    if request.format not in _FORMAT_FROM_PROTO:
        violations.append(FieldViolation("format", f"unknown value {request.format}"))
    if request.truncation.side not in _SIDES:
        violations.append(_unknown_side(request.truncation))
    if has_task and request.task not in _TASK_FROM_PROTO:
        violations.append(FieldViolation("task", f"unknown value {request.task}"))
    if violations:
        raise InvalidRequest(violations)


def _encode_input_from_proto(entry: embedding_pb2.EncodeInput) -> TextPrompt | TokenPrompt | None:
    match entry.WhichOneof("input"):
        case "text":
            return TextPrompt(text=entry.text)
        case "token_ids":
            return TokenPrompt(token_ids=tuple(entry.token_ids.ids))
    return None


def truncation_from_proto(truncation: embedding_pb2.Truncation) -> Truncation:
    """Raises InvalidRequest for a side that this version does not know."""
    if truncation.side not in _SIDES:
        raise InvalidRequest([_unknown_side(truncation)])
    limit = truncation.WhichOneof("limit")
    return Truncation(
        to_model_limit=limit == "model_limit",
        tokens=truncation.tokens if limit == "tokens" else None,
        keep_last=truncation.side != embedding_pb2.TRUNCATION_SIDE_RIGHT,
    )


def _unknown_side(truncation: embedding_pb2.Truncation, prefix: str = "") -> FieldViolation:
    return FieldViolation(f"{prefix}truncation.side", f"unknown value {truncation.side}")


def embedding_to_proto(
    vector: bytes, *, index: int, prompt_tokens: int, format: EmbeddingFormat, rows: int = 1
) -> embedding_pb2.Embedding:
    """`vector` holds little-endian 32-bit floats, `rows` vectors one after the other.

    Raises InvalidRequest when a number does not fit the format.
    """
    dimensions = len(vector) // (4 * rows)
    embedding = embedding_pb2.Embedding(index=index, prompt_tokens=prompt_tokens, dimensions=dimensions, rows=rows)
    if format is EmbeddingFormat.PACKED_FLOAT32:
        embedding.packed = vector
        return embedding
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    if format is EmbeddingFormat.FLOAT:
        embedding.values.extend(values)
        return embedding
    try:
        embedding.packed = struct.pack(f"<{len(values)}e", *values)
    except OverflowError as error:
        raise InvalidRequest([FieldViolation("format", "a number exceeds 16 bits; ask for FLOAT")]) from error
    return embedding
