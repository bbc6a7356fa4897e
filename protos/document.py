"""Writes the reference of the public API from the protos and their comments: a page a file, and a page of all calls.

python protos/document.py [OUTPUT_DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    MethodOptions,
    ServiceDescriptorProto,
)
from grpc_tools import protoc
from guide import guide

PROTOS = Path(__file__).resolve().parent
PUBLIC = PROTOS / "twinstage" / "v1"
PACKAGE = ".twinstage.v1."
OUTPUT = PROTOS.parent / "docs" / "api"

# Field numbers of descriptor.proto, by which source locations name what they belong to.
_MESSAGES, _ENUMS, _SERVICES, _SYNTAX = 4, 5, 6, 12
_FIELDS, _VALUES, _METHODS = 2, 2, 2

Place = tuple[int, ...]


def read_protoset(protoset: Path | None = None) -> FileDescriptorSet:
    """The public protos with what they import and all comments; written to `protoset` as well when it is given."""
    with tempfile.TemporaryDirectory() as directory:
        path = protoset or Path(directory) / "twinstage.protoset"
        arguments = [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            "--include_imports",
            "--include_source_info",
            f"--descriptor_set_out={path}",
            *(str(source) for source in sorted(PUBLIC.glob("*.proto"))),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        return FileDescriptorSet.FromString(path.read_bytes())


@dataclass(frozen=True, slots=True)
class Source:
    """One proto file: its description and its comments, by location."""

    file: FileDescriptorProto
    comments: dict[Place, str]

    @property
    def page(self) -> str:
        """Name of its page."""
        return f"{Path(self.file.name).stem}.md"


def document(output: Path) -> None:
    """Write all pages into `output`, and remove others of its pages."""
    sources = [
        Source(file, {tuple(place.path): place.leading_comments for place in file.source_code_info.location})
        for file in read_protoset().file
        if file.package == PACKAGE.strip(".")
    ]
    pages = {source.page: "".join(_page(source, _homes(sources))) for source in sources}
    pages["README.md"] = "".join(_index(sources))
    output.mkdir(parents=True, exist_ok=True)
    for known in output.glob("*.md"):
        if known.name not in pages:
            known.unlink()
    for name, text in pages.items():
        (output / name).write_text(text, encoding="utf-8")


def _homes(sources: list[Source]) -> dict[str, str]:
    """The page of each message and enumeration, by its full name."""
    return {
        f"{PACKAGE}{entry.name}": source.page
        for source in sources
        for entry in (*source.file.message_type, *source.file.enum_type)
    }


def _index(sources: list[Source]) -> Iterator[str]:
    yield "# The API, call by call\n\n"
    yield "Written by `make protos` from `protos/twinstage/v1`, whose comments say the same. Package `twinstage.v1`.\n"
    yield "\n"
    yield from guide()
    for source in sources:
        for number, service in enumerate(source.file.service):
            place = (_SERVICES, number)
            yield f"\n## {service.name}\n\n{_text(source, place)}\n\n| call | |\n|---|---|\n"
            for index, method in enumerate(service.method):
                first = _text(source, (*place, _METHODS, index)).partition(". ")[0].rstrip(".")
                yield f"| [{method.name}]({source.page}#{method.name.lower()}) | {_cell(first)} |\n"


def _page(source: Source, homes: dict[str, str]) -> Iterator[str]:
    yield f"# {source.file.name}\n\n{_text(source, (_SYNTAX,))}\n"
    for number, service in enumerate(source.file.service):
        yield from _service(source, (_SERVICES, number), service, homes)
    for number, message in enumerate(source.file.message_type):
        yield from _message(source, (_MESSAGES, number), message, homes)
    for number, enum in enumerate(source.file.enum_type):
        yield from _enum(source, (_ENUMS, number), enum)


def _service(source: Source, place: Place, service: ServiceDescriptorProto, homes: dict[str, str]) -> Iterator[str]:
    yield f"\n## {service.name}\n\n{_text(source, place)}\n"
    for index, method in enumerate(service.method):
        yield f"\n### {method.name}\n\n{_signature(source, method, homes)}\n\n"
        yield f"{_text(source, (*place, _METHODS, index))}\n"


def _signature(source: Source, method: MethodDescriptorProto, homes: dict[str, str]) -> str:
    takes = "stream of " * method.client_streaming + _linked(source, method.input_type, homes)
    gives = "stream of " * method.server_streaming + _linked(source, method.output_type, homes)
    reads = method.options.idempotency_level == MethodOptions.NO_SIDE_EFFECTS
    return f"{takes} → {gives}" + " · has no side effects" * reads


def _message(source: Source, place: Place, message: DescriptorProto, homes: dict[str, str]) -> Iterator[str]:
    yield f"\n## {message.name}\n\n{_text(source, place)}\n"
    if message.field:
        yield "\n| field | number | type | |\n|---|---|---|---|\n"
    entries = {f"{PACKAGE}{message.name}.{nested.name}": nested for nested in message.nested_type}
    for index, field in enumerate(message.field):
        words = _cell(_text(source, (*place, _FIELDS, index)))
        kind = _type(source, field, entries, homes)
        oneof = _oneof(message, field)
        yield f"| `{field.name}` | {field.number} | {kind}{oneof} | {words} |\n"


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return f", one of `{message.oneof_decl[field.oneof_index].name}`"


def _type(
    source: Source, field: FieldDescriptorProto, entries: dict[str, DescriptorProto], homes: dict[str, str]
) -> str:
    if (entry := entries.get(field.type_name)) is not None and entry.options.map_entry:
        key, value = (_type(source, part, entries, homes) for part in entry.field)
        return f"map of {key} to {value}"
    if field.type_name:
        name = _linked(source, field.type_name, homes)
    else:
        name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return "repeated " * repeated + "optional " * field.proto3_optional + name


def _enum(source: Source, place: Place, enum: EnumDescriptorProto) -> Iterator[str]:
    yield f"\n## {enum.name}\n\n{_text(source, place)}\n\n| value | number | |\n|---|---|---|\n"
    for index, value in enumerate(enum.value):
        words = _cell(_text(source, (*place, _VALUES, index)))
        yield f"| `{value.name}` | {value.number} | {words} |\n"


def _linked(source: Source, name: str, homes: dict[str, str]) -> str:
    short = name.removeprefix(PACKAGE).removeprefix(".")
    if name not in homes:
        return f"`{short}`"
    page = "" if homes[name] == source.page else homes[name]
    return f"[{short}]({page}#{short.lower()})"


def _text(source: Source, place: Place) -> str:
    """A comment as one paragraph."""
    return " ".join(source.comments.get(place, "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    document(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT)
