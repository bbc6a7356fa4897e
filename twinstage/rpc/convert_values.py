"""Conversion of plain values that messages of the public API share: durations, floats, optional fields, structs."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2, struct_pb2


def seconds_to_proto(seconds: float) -> duration_pb2.Duration:
    nanoseconds = round(seconds * 1e9)
    return duration_pb2.Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def seconds_from_proto(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def float_as_written(value: float) -> float:
    """The shortest decimal number that a 32-bit float stands for: 0.7, where widening gives 0.699999988.

    So a request means the same here as in a process that was given the number without a proto between.
    """
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def optional_from_proto(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def optional_float_from_proto(message: Any, name: str) -> float | None:
    return float_as_written(getattr(message, name)) if message.HasField(name) else None


def struct_from_proto(values: struct_pb2.Struct) -> Mapping[str, Any]:
    return {name: _value_from_proto(value) for name, value in values.fields.items()}


def _value_from_proto(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number  # templates print 3, not 3.0
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_value_from_proto(entry) for entry in value.list_value.values]
        case "struct_value":
            return struct_from_proto(value.struct_value)
    return None
