"""Any message of a type, for Hypothesis: each field may be set, to anything that it can hold; and bytes near to one."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MAX_DEPTH = 4
_INTERESTING_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 2.0, 3.4e38, float("inf"), float("-inf"), float("nan"))
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 9),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """A message of class `kind`."""
    message = kind()
    fields = list(kind.DESCRIPTOR.fields)
    chosen = draw(st.lists(st.sampled_from(fields), max_size=5, unique_by=lambda field: field.name)) if fields else []
    for field in chosen:
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE or depth < MAX_DEPTH:
            set_field(draw, message, field, depth)
    return message


@st.composite
def damaged(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """The bytes of a message, with some of them changed, left out, put in or repeated; or any bytes."""
    data = bytearray(draw(messages(kind)).SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(st.sampled_from((b"\xff" * 10, b"\x0a\x80", b"\xc3\x28", b"\x0b" * 200)) | st.binary(max_size=8))
        data[at : at + draw(st.integers(0, 3))] = piece
    return bytes(data)


def set_field(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    """Set a field to anything that it can hold."""
    if _is_map(field):
        value_field = field.message_type.fields_by_name["value"]
        entries = getattr(message, field.name)
        for key in draw(st.lists(_scalars(field.message_type.fields_by_name["key"]), max_size=3)):
            if value_field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                entries[key].CopyFrom(draw(messages(type(entries[key]), depth + 1)))
            else:
                entries[key] = draw(_scalars(value_field))
    elif field.is_repeated:
        values = _values(field, depth)
        getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(draw(_values(field, depth)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(_class_of(field.message_type), depth + 1)
    return _scalars(field)


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return st.integers(0, 300) | st.integers(low, high)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(_INTERESTING_FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry


def _class_of(descriptor: Descriptor) -> type[Message]:
    return descriptor._concrete_class
