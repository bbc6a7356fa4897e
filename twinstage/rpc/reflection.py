"""Server reflection, v1 and v1alpha, for the services of one server and for what their messages need.

The servicer that ships with grpcio speaks v1alpha only, and does not find methods, which is what ghz asks for. This
one answers from an index of its own, made once from the generated descriptors: files by name, and every symbol in
them - services, methods, messages, fields, oneofs, enums, enum values, extensions - by its full name. What the index
does not hold is NOT_FOUND, in the response and not as a status, as the protocol has it; it holds no file that the
exposed services do not need, except for google.rpc's error details, so that clients can print them.

v1 and v1alpha differ in the package only. The messages are the same on the wire, so the v1alpha classes serve both,
and the description of v1 is the renamed one of v1alpha.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2

from twinstage.errors import InternalError
from twinstage.rpc.endless import until_ending

if TYPE_CHECKING:  # generic for the type checker only
    Context = grpc.aio.ServicerContext[Any, Any]

V1_SERVICE = "grpc.reflection.v1.ServerReflection"
V1ALPHA_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
METHOD = "ServerReflectionInfo"

Request = reflection_pb2.ServerReflectionRequest
Response = reflection_pb2.ServerReflectionResponse


def add_reflection(
    server: grpc.aio.Server, service_names: Iterable[str], *, ending: asyncio.Event | None = None
) -> None:
    """Serve reflection on `server`, which has not been started. Lists `service_names` and reflection itself.

    Clients may keep a stream open without asking anything; at `ending` it ends all the same.

    Raises InternalError for a service whose generated code has not been imported.
    """
    names = sorted({*service_names, V1_SERVICE, V1ALPHA_SERVICE})
    index = _index([name for name in names if name != V1_SERVICE])
    servicer = ReflectionService(names, index, ending=ending or asyncio.Event())
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.server_reflection_info,
        request_deserializer=Request.FromString,
        response_serializer=Response.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, {METHOD: handler}) for name in (V1_SERVICE, V1ALPHA_SERVICE)]
    )


class ReflectionService:
    """Answers questions about descriptors from an index."""

    def __init__(self, service_names: Iterable[str], index: DescriptorIndex, *, ending: asyncio.Event) -> None:
        self._index = index
        self._ending = ending
        self._service_names = tuple(service_names)
        self._answers: dict[str, Callable[[Any], Any]] = {
            "file_by_filename": self._file_by_filename,
            "file_containing_symbol": self._file_containing_symbol,
            "file_containing_extension": self._file_containing_extension,
            "all_extension_numbers_of_type": self._all_extension_numbers_of_type,
            "list_services": self._list_services,
        }

    async def server_reflection_info(self, requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
        """One response per request, in order."""
        async for request in until_ending(requests, self._ending):
            question = request.WhichOneof("message_request")
            if question is None:
                response = _error(grpc.StatusCode.INVALID_ARGUMENT, "the request asks nothing")
            else:
                response = self._answers[question](getattr(request, question))
            response.valid_host = request.host
            response.original_request.CopyFrom(request)
            yield response

    def _file_by_filename(self, name: str) -> Any:
        return self._files_response(name, f"file {name!r}")

    def _file_containing_symbol(self, symbol: str) -> Any:
        return self._files_response(self._index.file_of_symbol.get(symbol.removeprefix(".")), f"symbol {symbol!r}")

    def _file_containing_extension(self, request: Any) -> Any:
        extended = request.containing_type.removeprefix(".")
        name = self._index.extensions.get(extended, {}).get(request.extension_number)
        return self._files_response(name, f"extension {request.extension_number} of {extended!r}")

    def _all_extension_numbers_of_type(self, message: str) -> Any:
        message = message.removeprefix(".")
        if message not in self._index.message_names:
            return _not_found(f"message {message!r}")
        numbers = sorted(self._index.extensions.get(message, {}))
        answer = reflection_pb2.ExtensionNumberResponse(base_type_name=message, extension_number=numbers)
        return Response(all_extension_numbers_response=answer)

    def _list_services(self, _: str) -> Any:
        services = [reflection_pb2.ServiceResponse(name=name) for name in self._service_names]
        return Response(list_services_response=reflection_pb2.ListServiceResponse(service=services))

    def _files_response(self, name: str | None, sought: str) -> Any:
        if name is None or name not in self._index.files:
            return _not_found(sought)
        serialized = [self._index.files[needed].SerializeToString() for needed in self._index.with_dependencies(name)]
        return Response(
            file_descriptor_response=reflection_pb2.FileDescriptorResponse(file_descriptor_proto=serialized)
        )


def _not_found(sought: str) -> Any:
    return _error(grpc.StatusCode.NOT_FOUND, f"{sought} is not known here")


def _error(code: grpc.StatusCode, message: str) -> Any:
    return Response(error_response=reflection_pb2.ErrorResponse(error_code=code.value[0], error_message=message))


# --- the index ------------------------------------------------------------------------------------


@dataclass(slots=True)
class DescriptorIndex:
    """Files by name, and by full name the file of each symbol and of each extension (by extended message, number)."""

    files: dict[str, FileDescriptorProto] = field(default_factory=dict)
    file_of_symbol: dict[str, str] = field(default_factory=dict)
    message_names: set[str] = field(default_factory=set)
    extensions: dict[str, dict[int, str]] = field(default_factory=dict)

    def with_dependencies(self, name: str) -> list[str]:
        """The file first, then all that it imports, directly or not, each once."""
        names = [name]
        for known in names:  # grows while it is walked
            names += [needed for needed in self.files[known].dependency if needed not in names]
        return names

    def add(self, file: FileDescriptorProto) -> None:
        """Index a file. Adding it again changes nothing."""
        self.files[file.name] = file
        package = _prefix(file.package)
        for message in file.message_type:
            self._add_message(file, package, message)
        self._add_symbols(file, _enum_symbols(package, file.enum_type))
        self._add_extensions(file, package, file.extension)
        for service in file.service:
            self._add_symbols(file, [package + service.name])
            self._add_symbols(file, [f"{package}{service.name}.{method.name}" for method in service.method])

    def _add_message(self, file: FileDescriptorProto, scope: str, message: DescriptorProto) -> None:
        name = scope + message.name
        self.message_names.add(name)
        self._add_symbols(file, [name])
        self._add_symbols(file, [f"{name}.{member.name}" for member in message.field])
        self._add_symbols(file, [f"{name}.{oneof.name}" for oneof in message.oneof_decl])
        self._add_symbols(file, _enum_symbols(_prefix(name), message.enum_type))
        self._add_extensions(file, _prefix(name), message.extension)
        for nested in message.nested_type:
            self._add_message(file, _prefix(name), nested)

    def _add_extensions(self, file: FileDescriptorProto, scope: str, fields: Iterable[FieldDescriptorProto]) -> None:
        for extension in fields:
            self._add_symbols(file, [scope + extension.name])
            self.extensions.setdefault(extension.extendee.removeprefix("."), {})[extension.number] = file.name

    def _add_symbols(self, file: FileDescriptorProto, symbols: Iterable[str]) -> None:
        self.file_of_symbol.update(dict.fromkeys(symbols, file.name))


def _prefix(scope: str) -> str:
    return f"{scope}." if scope else ""


def _enum_symbols(scope: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    """Enums and their values; a value's full name is beside its enum's and not below it."""
    for enum in enums:
        yield scope + enum.name
        for value in enum.value:
            yield scope + value.name


def _index(service_names: Iterable[str]) -> DescriptorIndex:
    """An index of the files of these services, of google.rpc's error details, and of reflection v1."""
    index, pool = DescriptorIndex(), descriptor_pool.Default()
    roots = [error_details_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    for name in service_names:
        try:
            roots.append(pool.FindServiceByName(name).file)
        except KeyError:
            raise InternalError(f"the generated code of service {name} has not been imported") from None
    _add_with_dependencies(index, roots)
    index.add(_v1_file(index.files[reflection_pb2.DESCRIPTOR.name]))
    return index


def _add_with_dependencies(index: DescriptorIndex, files: Iterable[FileDescriptor]) -> None:
    for file in files:
        if file.name not in index.files:
            index.add(FileDescriptorProto.FromString(file.serialized_pb))
            _add_with_dependencies(index, file.dependencies)


def _v1_file(v1alpha: FileDescriptorProto) -> FileDescriptorProto:
    """The description of reflection v1, made from that of v1alpha."""
    file = FileDescriptorProto(name="grpc/reflection/v1/reflection.proto", syntax=v1alpha.syntax)
    file.package = "grpc.reflection.v1"
    old_scope, new_scope = f".{v1alpha.package}.", f".{file.package}."
    file.message_type.extend(v1alpha.message_type)
    file.service.extend(v1alpha.service)
    for message in file.message_type:
        for member in message.field:
            if member.HasField("type_name"):  # a scalar has none, and may not be given an empty one
                member.type_name = member.type_name.replace(old_scope, new_scope)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old_scope, new_scope)
            method.output_type = method.output_type.replace(old_scope, new_scope)
    return file
