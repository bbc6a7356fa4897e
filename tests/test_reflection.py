"""Reflection knows every symbol of the services that it lists, in both versions, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ghz_contract import REFLECTION_VERSIONS, ask, list_services, resolve_method
from twinstage.errors import InternalError
from twinstage.rpc.health import SERVICE_NAME as HEALTH
from twinstage.rpc.reflection import DescriptorIndex, add_reflection
from twinstage.rpc.server import bind, create_server
from twinstage.v1 import generation_pb2, tokenizer_pb2
from twinstage.worker.v1 import worker_pb2

GENERATION = "twinstage.v1.GenerationService"
FILE = "twinstage/v1/generation.proto"
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
both_versions = pytest.mark.parametrize("version", REFLECTION_VERSIONS)


@contextlib.asynccontextmanager
async def reflecting() -> AsyncIterator[grpc.aio.Channel]:
    server = create_server()
    add_reflection(server, [HEALTH, GENERATION])
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def files_of(response: Any) -> list[FileDescriptorProto]:
    return [FileDescriptorProto.FromString(item) for item in response.file_descriptor_response.file_descriptor_proto]


async def test_services_are_listed_in_both_versions() -> None:
    expected = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        GENERATION,
    ]
    async with reflecting() as channel:
        assert await list_services(channel) == (expected, "v1")
        response = await ask(channel, "v1alpha", list_services="*")
    assert [service.name for service in response.list_services_response.service] == expected


@both_versions
@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (GENERATION, FILE),
        (f"{GENERATION}.Generate", FILE),
        (f"{GENERATION}.ChatStream", FILE),
        ("twinstage.v1.GenerateRequest", FILE),
        (".twinstage.v1.GenerateRequest", FILE),
        ("twinstage.v1.GenerateRequest.prompt", FILE),
        ("twinstage.v1.GenerateRequest.input", FILE),
        ("twinstage.v1.SamplingOptions.LogitBiasEntry", "twinstage/v1/common.proto"),
        ("twinstage.v1.FinishReason", "twinstage/v1/common.proto"),
        ("twinstage.v1.FINISH_REASON_STOP", "twinstage/v1/common.proto"),
        ("google.protobuf.Duration.seconds", "google/protobuf/duration.proto"),
        ("google.rpc.RetryInfo", "google/rpc/error_details.proto"),
        ("google.rpc.BadRequest.FieldViolation.field", "google/rpc/error_details.proto"),
        (f"{HEALTH}.Check", health_pb2.DESCRIPTOR.name),
        ("grpc.reflection.v1.ServerReflection.ServerReflectionInfo", "grpc/reflection/v1/reflection.proto"),
        ("grpc.reflection.v1alpha.ServerReflection", reflection_pb2.DESCRIPTOR.name),
    ],
)
async def test_symbols_of_every_kind_are_found(version: str, symbol: str, file: str) -> None:
    async with reflecting() as channel:
        response = await ask(channel, version, file_containing_symbol=symbol, host="here")
    names = [item.name for item in files_of(response)]
    assert names[0] == file
    assert len(names) == len(set(names))
    assert response.valid_host == "here"
    assert response.original_request.file_containing_symbol == symbol


@both_versions
async def test_files_come_with_all_that_they_import(version: str) -> None:
    async with reflecting() as channel:
        files = files_of(await ask(channel, version, file_by_filename=FILE))
    assert files[0] == FileDescriptorProto.FromString(generation_pb2.DESCRIPTOR.serialized_pb)
    names = {item.name for item in files}
    assert {needed for item in files for needed in item.dependency} <= names


@both_versions
@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "twinstage/v1/nothing.proto"},
        {"file_containing_symbol": "twinstage.v1.Nothing"},
        {"file_containing_symbol": f"{GENERATION}.Nothing"},
        {"file_containing_symbol": ""},
        {"file_containing_symbol": "x" * 100_000},
        {"file_by_filename": worker_pb2.DESCRIPTOR.name},
        {"file_containing_symbol": "twinstage.worker.v1.KvGrant"},
        {"file_containing_symbol": tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name},
        {"all_extension_numbers_of_type": "twinstage.v1.Nothing"},
        {
            "file_containing_extension": reflection_pb2.ExtensionRequest(
                containing_type="twinstage.v1.GenerateRequest", extension_number=1
            )
        },
    ],
    ids=lambda question: next(iter(question)),
)
async def test_what_is_unknown_or_not_exposed_is_not_found_in_the_stream(version: str, question: Any) -> None:
    async with reflecting() as channel:
        response = await ask(channel, version, **question)
    assert response.error_response.error_code == NOT_FOUND


@both_versions
async def test_messages_without_extensions_have_none(version: str) -> None:
    async with reflecting() as channel:
        response = await ask(channel, version, all_extension_numbers_of_type="twinstage.v1.GenerateRequest")
    answer = response.all_extension_numbers_response
    assert (answer.base_type_name, list(answer.extension_number)) == ("twinstage.v1.GenerateRequest", [])


@both_versions
async def test_a_question_that_asks_nothing_is_invalid_and_the_stream_goes_on(version: str) -> None:
    questions = [{}, {"file_containing_symbol": "nothing"}, {"file_containing_symbol": GENERATION}]
    requests = [reflection_pb2.ServerReflectionRequest(**question) for question in questions]
    async with reflecting() as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        responses = [response async for response in call(iter(requests), timeout=5)]
    assert responses[0].error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert responses[1].error_response.error_code == NOT_FOUND
    assert files_of(responses[2])[0].name == FILE
    assert [response.original_request for response in responses] == requests


@both_versions
@pytest.mark.parametrize("service", ["grpc.reflection.v1.ServerReflection", HEALTH, GENERATION])
async def test_every_listed_service_can_be_built_from_the_answers_alone(version: str, service: str) -> None:
    methods = {HEALTH: "Watch", GENERATION: "GenerateStream"}
    async with reflecting() as channel:
        method = await resolve_method(channel, version, f"{service}/{methods.get(service, 'ServerReflectionInfo')}")
    assert method.containing_service.full_name == service
    assert method.input_type.file.pool is not descriptor_pool.Default()


def test_extensions_are_indexed() -> None:
    file = FileDescriptorProto(name="a.proto", package="a")
    file.extension.add(name="top", extendee=".a.Base", number=100)
    file.message_type.add(name="Holder").extension.add(name="nested", extendee=".a.Base", number=101)
    index = DescriptorIndex()
    index.add(file)
    assert index.extensions == {"a.Base": {100: "a.proto", 101: "a.proto"}}
    assert index.file_of_symbol["a.Holder.nested"] == index.file_of_symbol["a.top"] == "a.proto"


async def test_a_service_without_generated_code_is_our_bug() -> None:
    with pytest.raises(InternalError, match=r"twinstage\.v1\.Nothing"):
        add_reflection(create_server(), ["twinstage.v1.Nothing"])
