"""Limits of requests and connections: each names the field and the number, which docs/limits.md has as well."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

from fake_workers import until
from harness import ROOT
from router import limits
from served_router import details, failing, serving
from twinstage.rpc.server import MAX_METADATA_BYTES
from twinstage.transfer.shm import PrivateSocket
from twinstage.v1 import (
    admin_pb2,
    embedding_pb2,
    generation_pb2,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

HELLO: dict[str, Any] = {"prompt": "Hello"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
IDS = {"ids": [1] * (limits.MAX_TOKEN_IDS + 1)}

GENERATE: list[tuple[dict[str, Any], str, int]] = [
    ({"prompt_token_ids": IDS}, "prompt_token_ids.ids", limits.MAX_TOKEN_IDS),
    ({"batch": {"prompts": [HELLO] * 1025}}, "batch.prompts", limits.MAX_ENTRIES),
    ({**HELLO, "model": "m" * 257}, "model", limits.MAX_NAME_CHARACTERS),
    ({**HELLO, "structured_output": {"regex": "a" * 262_144}}, "structured_output", limits.MAX_STRUCTURED_OUTPUT_BYTES),
    ({**HELLO, "sampling": {"n": 129}}, "sampling.n", limits.MAX_CHOICES),
    (
        {**HELLO, "sampling": {"logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)}},
        "sampling.logit_bias",
        limits.MAX_ENTRIES,
    ),
    ({**HELLO, "stopping": {"stop": ["a"] * 17}}, "stopping.stop", limits.MAX_STOP_STRINGS),
    ({**HELLO, "stopping": {"stop": ["a", "b" * 1025]}}, "stopping.stop[1]", limits.MAX_STOP_CHARACTERS),
    ({**HELLO, "stopping": {"stop_token_ids": [1] * 1025}}, "stopping.stop_token_ids", limits.MAX_ENTRIES),
    (
        {**HELLO, "stopping": {"repetition_detection": {"min_count": limits.MAX_PATTERN_COUNT + 1}}},
        "stopping.repetition_detection.min_count",
        limits.MAX_PATTERN_COUNT,
    ),
    ({**HELLO, "output": {"logprobs": 21}}, "output.logprobs", limits.MAX_LOGPROBS),
    ({**HELLO, "priority": 101}, "priority", limits.MAX_PRIORITY),
    ({**HELLO, "request_id": "r" * 129}, "request_id", limits.MAX_REQUEST_ID_LENGTH),
    ({**HELLO, "cache_salt": "ä" * 65}, "cache_salt", limits.MAX_SALT_BYTES),
]
CHATS: list[tuple[dict[str, Any], str, int]] = [
    ({"messages": CHAT["messages"] * 4097}, "messages", limits.MAX_MESSAGES),
    ({"messages": [{"role": "r" * 257, "content": ""}]}, "messages[0].role", limits.MAX_NAME_CHARACTERS),
    ({"messages": [{"role": "user", "name": "n" * 257}]}, "messages[0].name", limits.MAX_NAME_CHARACTERS),
    ({**CHAT, "chat_template": "t" * 65_537}, "chat_template", limits.MAX_TEMPLATE_CHARACTERS),
    (
        {**CHAT, "chat_template_kwargs": {"tools": "t" * 262_144}},
        "chat_template_kwargs",
        limits.MAX_TEMPLATE_OPTIONS_BYTES,
    ),
]


async def test_each_limit_of_a_request_is_named() -> None:
    documented = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    async with serving("--trust-request-chat-template") as service:
        embedding = service.embedding
        texts = embedding_pb2.EmbedRequest(texts=["a"] * 2049)
        inputs = embedding_pb2.EncodeRequest(inputs=[embedding_pb2.EncodeInput(text="a")] * 2049)
        cases = [(embedding.Embed, texts, "texts", 2048), (embedding.Encode, inputs, "inputs", limits.MAX_INPUTS)]
        cases += [
            (service.generation.Generate, _message(fields, generation_pb2.GenerateRequest()), field, limit)
            for fields, field, limit in GENERATE
        ]
        cases += [
            (service.generation.Chat, _message(fields, generation_pb2.ChatRequest()), field, limit)
            for fields, field, limit in CHATS
        ]
        for method, request, field, limit in cases:
            error = await failing(method(request, timeout=10))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, field
            violations = {v.field: v.description for v in details(error)["BadRequest"].field_violations}
            assert list(violations) == [field]
            assert str(limit) in violations[field], violations
            assert f"{limit:,}" in documented, field


async def test_the_name_of_a_model_is_limited_in_every_call() -> None:
    name = "m" * (limits.MAX_NAME_CHARACTERS + 1)
    async with serving("--trust-request-chat-template") as service:
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
        models = model_pb2_grpc.ModelServiceStub(service.channel)
        calls: list[tuple[Any, Any, str]] = [
            (service.generation.Generate, generation_pb2.GenerateRequest(model=name), "model"),
            (service.generation.Chat, generation_pb2.ChatRequest(model=name), "model"),
            (service.embedding.Encode, embedding_pb2.EncodeRequest(model=name), "model"),
            (service.embedding.Embed, embedding_pb2.EmbedRequest(model=name), "model"),
            (tokenizer.Tokenize, tokenizer_pb2.TokenizeRequest(model=name), "model"),
            (tokenizer.Detokenize, tokenizer_pb2.DetokenizeRequest(model=name), "model"),
            (tokenizer.RenderChat, tokenizer_pb2.RenderChatRequest(model=name), "model"),
            (models.GetModel, model_pb2.GetModelRequest(name=name), "name"),
            (service.admin.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest(model=name), "model"),
        ]
        for method, request, field in calls:
            error = await failing(method(request, timeout=10))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, type(request)
            assert [v.field for v in details(error)["BadRequest"].field_violations] == [field]
        requests = iter([embedding_pb2.EncodeStreamRequest(model=name)])
        (item,) = [item async for item in service.embedding.EncodeStream(requests, timeout=10)]
        assert item.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "at most 256 characters" in item.error.message


def _message(fields: dict[str, Any], message: Any) -> Any:
    return json_format.ParseDict(fields, message)


async def test_at_the_limits_a_request_is_served() -> None:
    fields = {
        **HELLO,
        "stopping": {"stop": ["b" * 1024] * 16, "stop_token_ids": [1] * 1024, "max_tokens": 1},
        "priority": 100,
        "request_id": "r" * 128,
        "cache_salt": "ä" * 64,
        "output": {"logprobs": 20},
    }
    async with serving() as service:
        await service.generation.Generate(_message(fields, generation_pb2.GenerateRequest()), timeout=10)


async def test_metadata_are_limited() -> None:
    async with serving() as service:
        request = generation_pb2.GenerateRequest(**HELLO)
        error = await failing(
            service.generation.Generate(request, metadata=[("x-big", "x" * MAX_METADATA_BYTES)], timeout=10)
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await service.generation.Generate(request, metadata=[("x-big", "x" * 8000)], timeout=10)


async def test_streams_of_a_connection_are_limited() -> None:
    async with serving("--max-streams-per-connection", "1") as service:
        watch = service.health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        await watch.read()
        waiting = service.generation.Generate(generation_pb2.GenerateRequest(**HELLO), timeout=20)
        await asyncio.sleep(0.2)
        assert not waiting.done()
        watch.cancel()
        await waiting


async def test_connections_are_limited() -> None:
    async with serving("--max-connections", "2") as service:
        await service.generation.Generate(generation_pb2.GenerateRequest(**HELLO), timeout=10)
        address = ("127.0.0.1", service.router.port)
        with socket.create_connection(address) as second, socket.create_connection(address) as third:
            for connection in (second, third):
                connection.setblocking(False)
            await until(lambda: _is_closed(third), what="the third connection is closed")
            assert not _is_closed(second)
        await service.generation.Generate(generation_pb2.GenerateRequest(**HELLO), timeout=10)


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_nobody_else_gets_at_the_socket_of_shared_memory(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        private = PrivateSocket(tmp_path / "sockets")
    finally:
        os.umask(mask)
    try:
        modes = [
            stat.S_IMODE(path.stat().st_mode) for path in (private.path, private.path.parent, tmp_path / "sockets")
        ]
        assert modes == [0o600, 0o700, 0o700]
    finally:
        private.close()
