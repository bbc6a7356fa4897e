"""What reads foreign bytes takes any of them: a fixed corpus, and inputs made anew from it, the same in every run.

`make fuzz` searches on, guided by coverage; its finds go to the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.messages import damaged, messages
from fuzz.seeds import seeds
from fuzz.targets import TARGETS
from router.service import right_for
from router_thread import RunningRouter
from twinstage.rpc.callers import Right
from twinstage.v1 import (
    admin_pb2,
    common_pb2,
    embedding_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    scoring_pb2,
    tokenizer_pb2,
)

REPEATABLE = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
REQUESTS = (
    generation_pb2.GenerateRequest,
    generation_pb2.ChatRequest,
    tokenizer_pb2.RenderChatRequest,
    embedding_pb2.EncodeRequest,
    embedding_pb2.EmbedRequest,
    embedding_pb2.EncodeStreamRequest,
)  # in the order of the target's first byte
FILES = (admin_pb2, embedding_pb2, generation_pb2, model_pb2, scoring_pb2, tokenizer_pb2)
# Those that tell a client what is wrong with its request. INTERNAL, UNKNOWN and UNAVAILABLE would be ours.
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_corpus_and_what_is_near_to_it(target: str) -> None:
    known = seeds(target)
    for data in known:
        TARGETS[target](data)

    @settings(REPEATABLE, max_examples=150)
    @given(st.sampled_from(known), st.integers(0, 2**16), st.integers(0, 8), st.binary(max_size=8))
    def damage(data: bytes, where: int, length: int, piece: bytes) -> None:
        at = where % (len(data) + 1)
        TARGETS[target](data[:at] + piece + data[at + length :])

    damage()


@settings(REPEATABLE, max_examples=150)
@given(st.integers(0, len(REQUESTS) - 1).flatmap(lambda number: st.tuples(st.just(number), messages(REQUESTS[number]))))
def test_any_message_is_taken_or_refused_in_words(case: tuple[int, Message]) -> None:
    number, message = case
    TARGETS["public"](bytes([number]) + message.SerializeToString())


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with RunningRouter() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def _methods() -> list[tuple[str, type[Message], bool]]:
    """Path, request class and whether the method takes a stream, of what the router serves to all callers.

    Without WatchLoad, which has no end: random requests call it.
    """
    return [
        (f"/{service.full_name}/{method.name}", method.input_type._concrete_class, method.client_streaming)
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name != "WatchLoad"
        # AbortRequest would have to guess an id.
        and (method.name == "AbortRequest" or right_for(f"/{service.full_name}/{method.name}") is Right.USE)
    ]


def _status(channel: grpc.Channel, path: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """Send raw bytes as a message; every kind of method is a stream on the wire."""
    call: Any = channel.stream_stream(path)(iter([data]), timeout=20)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    return call.code(), call.details()


def test_any_bytes_to_any_method_are_answered(channel: grpc.Channel) -> None:
    methods = _methods()
    assert len(methods) >= 14

    @settings(REPEATABLE, max_examples=120)
    @given(st.sampled_from(methods).flatmap(lambda m: st.tuples(st.just(m[0]), damaged(m[1]))))
    def send(case: tuple[str, bytes]) -> None:
        code, message = _status(channel, *case)
        assert code in ANSWERS, (code, message)

    send()
    request = generation_pb2.GenerateRequest(prompt="Hello", stopping=common_pb2.StoppingOptions(max_tokens=2))
    answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=20)
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0b" * 50_000, id="groups that never end"),
        pytest.param(b"\x0a\x02\xc3\x28", id="text that is no UTF-8"),
        pytest.param(b"\xff" * 100, id="a number that never ends"),
        pytest.param(b"\x0a\xff\xff\xff\xff\x0f", id="a length beyond the end"),
    ],
)
def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, data: bytes) -> None:
    for path, kind, _ in _methods():
        if kind.DESCRIPTOR.fields:
            code, _ = _status(channel, path, data)
            assert code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}, path


def test_a_conversation_of_great_depth_is_refused_or_rendered(channel: grpc.Channel) -> None:
    kwargs = b""
    for _ in range(200):  # Struct { fields: { key: "a", value: { struct_value: ... } } }
        value = b"\x2a" + _varint(len(kwargs)) + kwargs
        entry = b"\x0a\x01a\x12" + _varint(len(value)) + value
        kwargs = b"\x0a" + _varint(len(entry)) + entry
    request = generation_pb2.ChatRequest(messages=[generation_pb2.ChatMessage(role="user", content="a")])
    data = request.SerializeToString() + b"\x52" + _varint(len(kwargs)) + kwargs
    code, _ = _status(channel, "/twinstage.v1.GenerationService/Chat", data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
