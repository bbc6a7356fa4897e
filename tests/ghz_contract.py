"""What ghz does with a server, done step by step, so that a test can stand in for it.

    ghz --insecure --call twinstage.v1.GenerationService/Generate -d '{"prompt":"Hello"}' -n 200 -c 50 -t 20s host:port

dials in plaintext, asks reflection v1 (v1alpha where there is no v1) for the services and for the *method* symbol,
builds every descriptor from the answers and from nothing else, reads the message from strict JSON, and sends the
calls. No generated code of the service is used here: a schema that reflection does not give is a schema that ghz
does not have.

    report = asyncio.run(run_ghz("127.0.0.1:50051"))
    python tests/ghz_contract.py 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

DEFAULT_CALL = "twinstage.v1.GenerationService.Generate"
DEFAULT_DATA = '{"prompt":"Hello"}'
DIAL_TIMEOUT_S = 10.0
REFLECTION_TIMEOUT_S = 10.0
REFLECTION_VERSIONS = ("v1", "v1alpha")


class ContractBroken(Exception):
    """The server does not give ghz what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GhzReport:
    """What came of the calls. Times are seconds."""

    services: tuple[str, ...]
    reflection_version: str
    codes: dict[str, int]
    exhausted_without_retry_info: int
    first_messages: dict[str, str] = field(default_factory=dict)
    first_response: dict[str, Any] | None = None
    slowest_s: float
    elapsed_s: float

    @property
    def total(self) -> int:
        return sum(self.codes.values())

    @property
    def ok(self) -> int:
        return self.codes.get("OK", 0)

    def assert_kept(self) -> None:
        """Raises ContractBroken unless some calls succeeded and all others were refused with a time to come back."""
        unexpected = {
            code: self.first_messages.get(code, "") for code in set(self.codes) - {"OK", "RESOURCE_EXHAUSTED"}
        }
        if unexpected:
            raise ContractBroken(f"unexpected failures {unexpected} among {self.codes}")
        if self.exhausted_without_retry_info:
            raise ContractBroken(f"{self.exhausted_without_retry_info} refusals without RetryInfo")
        if not self.ok:
            raise ContractBroken(f"no call succeeded: {self.codes}")


async def run_ghz(
    address: str,
    *,
    call: str = DEFAULT_CALL,
    data: str = DEFAULT_DATA,
    total: int = 200,
    concurrency: int = 50,
    timeout_s: float = 20.0,
) -> GhzReport:
    """Do what ghz does. Raises ContractBroken when it would not come as far as sending calls."""
    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), DIAL_TIMEOUT_S)
        services, version = await list_services(channel)
        method = await resolve_method(channel, version, call)
        request = parse_message(method, data)
        return await _send(
            channel,
            method,
            request,
            total=total,
            concurrency=concurrency,
            timeout_s=timeout_s,
            known=(tuple(services), version),
        )


# --- reflection -----------------------------------------------------------------------------------


async def list_services(channel: grpc.aio.Channel) -> tuple[list[str], str]:
    """The services, and the version of reflection that listed them: v1 if the server has it."""
    for version in REFLECTION_VERSIONS:
        try:
            response = await ask(channel, version, list_services="")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            continue
        return [service.name for service in response.list_services_response.service], version
    raise ContractBroken("the server has no reflection")


async def ask(channel: grpc.aio.Channel, version: str, **question: Any) -> Any:
    """One question and its answer. v1 and v1alpha have the same messages under different package names."""
    method = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def requests() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(**question)

    call = method(requests(), timeout=REFLECTION_TIMEOUT_S)
    async for response in call:
        return response
    raise ContractBroken(f"no answer to {question}")


async def resolve_method(channel: grpc.aio.Channel, version: str, call: str) -> MethodDescriptor:
    """The descriptor of a method, from a pool that holds what reflection sent and nothing else."""
    symbol = call.replace("/", ".")
    files: dict[str, FileDescriptorProto] = {}
    root = await _fetch(channel, version, files, file_containing_symbol=symbol)
    await _fetch_dependencies(channel, version, files, root)
    pool = descriptor_pool.DescriptorPool()
    _add(pool, files, root, added=set())
    try:
        return pool.FindMethodByName(symbol)
    except KeyError:
        raise ContractBroken(f"the files for {symbol} do not define it") from None


async def _fetch(
    channel: grpc.aio.Channel, version: str, files: dict[str, FileDescriptorProto], **question: Any
) -> FileDescriptorProto:
    """Keep the files of one answer and return the first, which is the one that was asked for."""
    response = await ask(channel, version, **question)
    if response.HasField("error_response"):
        error = response.error_response
        raise ContractBroken(f"{question}: {error.error_message} ({error.error_code})")
    sent = response.file_descriptor_response.file_descriptor_proto
    received = [FileDescriptorProto.FromString(serialized) for serialized in sent]
    files.update({file.name: file for file in received})
    return received[0]


async def _fetch_dependencies(
    channel: grpc.aio.Channel, version: str, files: dict[str, FileDescriptorProto], file: FileDescriptorProto
) -> None:
    for name in file.dependency:
        needed = files.get(name) or await _fetch(channel, version, files, file_by_filename=name)
        await _fetch_dependencies(channel, version, files, needed)


def _add(
    pool: descriptor_pool.DescriptorPool,
    files: dict[str, FileDescriptorProto],
    file: FileDescriptorProto,
    *,
    added: set[str],
) -> None:
    """Add a file after all that it imports."""
    if file.name in added:
        return
    added.add(file.name)
    for name in file.dependency:
        _add(pool, files, files[name], added=added)
    pool.Add(file)


def parse_message(method: MethodDescriptor, data: str) -> Any:
    """The request, from JSON in which every field must be known."""
    message = message_factory.GetMessageClass(method.input_type)()
    return json_format.Parse(data, message, ignore_unknown_fields=False)


# --- calls ----------------------------------------------------------------------------------------


async def _send(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    request: Any,
    *,
    total: int,
    concurrency: int,
    timeout_s: float,
    known: tuple[tuple[str, ...], str],
) -> GhzReport:
    response_class = message_factory.GetMessageClass(method.output_type)
    unary = channel.unary_unary(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=response_class.FromString,
    )
    outcomes: list[_Outcome] = []
    numbers = iter(range(total))

    async def worker() -> None:
        for _ in numbers:  # shared: each number is one call
            outcome = await _call_once(unary, request, timeout_s)
            outcomes.append(outcome)

    started_s = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    services, version = known
    return GhzReport(
        services=services,
        reflection_version=version,
        codes=dict(Counter(outcome.code for outcome in outcomes)),
        exhausted_without_retry_info=sum(
            outcome.code == "RESOURCE_EXHAUSTED" and not outcome.has_retry_info for outcome in outcomes
        ),
        first_messages={outcome.code: outcome.message for outcome in reversed(outcomes)},
        first_response=next((outcome.response for outcome in outcomes if outcome.response is not None), None),
        slowest_s=max((outcome.seconds for outcome in outcomes), default=0.0),
        elapsed_s=time.monotonic() - started_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    code: str
    seconds: float
    message: str = ""
    has_retry_info: bool = False
    response: dict[str, Any] | None = None


async def _call_once(unary: Any, request: Any, timeout_s: float) -> _Outcome:
    started_s = time.monotonic()
    try:
        response = await unary(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return _Outcome(
            code=error.code().name,
            message=error.details() or "",
            has_retry_info=_has_retry_info(error),
            seconds=time.monotonic() - started_s,
        )
    seconds = time.monotonic() - started_s
    return _Outcome(code="OK", seconds=seconds, response=json_format.MessageToDict(response))


def _has_retry_info(error: grpc.aio.AioRpcError) -> bool:
    status = rpc_status.from_call(error)
    details: Iterable[Any] = status.details if status is not None else ()
    return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


def main() -> None:
    parser = argparse.ArgumentParser(description="Do what ghz does against a running server.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("--call", default=DEFAULT_CALL, help="the method's full name (default: %(default)s)")
    parser.add_argument("--data", default=DEFAULT_DATA, help="the request as JSON (default: %(default)s)")
    parser.add_argument("--total", type=int, default=200, help="calls in all (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=50, help="calls at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=20.0, help="deadline in seconds (default: %(default)s)")
    arguments = parser.parse_args()
    report = asyncio.run(
        run_ghz(
            arguments.address,
            call=arguments.call,
            data=arguments.data,
            total=arguments.total,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout,
        )
    )
    print(json.dumps({"codes": report.codes, "slowest_s": report.slowest_s, "elapsed_s": report.elapsed_s}, indent=2))
    report.assert_kept()


if __name__ == "__main__":
    main()
