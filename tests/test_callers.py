"""Tokens: who gets in, with which right, and that no token is ever told to anybody."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from structlog.testing import capture_logs

from rpc_service import KINDS, SERVICE, serving
from twinstage.errors import ConfigError, PermissionDenied, TwinstageError, Unauthenticated
from twinstage.rpc import reloaded
from twinstage.rpc.access import Access
from twinstage.rpc.callers import (
    CallerInterceptor,
    Right,
    callers_with_secrets,
    current_caller,
    read_callers,
    read_shared_secrets,
)
from twinstage.rpc.reloaded import Reloaded
from twinstage.rpc.status import error_from_rpc

TOKEN, ADMIN_TOKEN = "search-token-0123456789", "operator-token-0123456789"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    digest = hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest()
    path.write_text(f"# who calls\nsearch {TOKEN}\n\noperations sha256:{digest} use,admin\n")
    return path


async def _once(request: Any, context: Any) -> StringValue:
    return StringValue(value=current_caller())


async def _stream(request: Any, context: Any) -> AsyncIterator[StringValue]:
    yield StringValue(value=current_caller())


BEHAVIOURS: dict[str, Any] = {
    "unary_unary": _once,
    "unary_stream": _stream,
    "stream_unary": _once,
    "stream_stream": _stream,
}


def _interceptor(path: Path) -> CallerInterceptor:
    return CallerInterceptor(
        Reloaded([path], lambda: read_callers(path, flag="--tokens-file")).current,
        right_for=lambda method: Right.ADMIN if method == f"/{SERVICE}/stream_unary" else Right.USE,
    )


async def _refusal(service: Any, kind: str, *metadata: tuple[str, str]) -> TwinstageError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.call(kind, metadata=metadata, timeout=10)
    assert TOKEN not in str(caught.value)
    return error_from_rpc(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "Bearer wrong-token-0123456789")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {ADMIN_TOKEN}")],
    ],
)
async def test_without_a_known_token_nothing_is_served(tokens: Path, metadata: list[tuple[str, str]]) -> None:
    async with serving(interceptors=[_interceptor(tokens)], **BEHAVIOURS) as service:
        for kind in KINDS:
            error = await _refusal(service, kind, *metadata)
            assert type(error) is Unauthenticated, kind


async def test_callers_may_what_their_rights_say(tokens: Path) -> None:
    async with serving(interceptors=[_interceptor(tokens)], **BEHAVIOURS) as service:
        search, operations = ("authorization", f"Bearer {TOKEN}"), ("authorization", f"bearer {ADMIN_TOKEN}")
        for kind in KINDS:
            assert await service.call(kind, metadata=[operations], timeout=10) == ["operations"]
            if kind == "stream_unary":
                error = await _refusal(service, kind, search)
                assert type(error) is PermissionDenied
                assert "admin" in str(error)
            else:
                assert await service.call(kind, metadata=[search], timeout=10) == ["search"]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:  # who may not call learns not even what there is
            await service.channel.unary_unary(f"/{SERVICE}/Nothing")(b"", timeout=10)
        assert unknown.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_access_sends_the_token_with_every_kind_of_call(tokens: Path) -> None:
    async with serving(interceptors=[_interceptor(tokens)], **BEHAVIOURS) as service:
        channel = Access(token=ADMIN_TOKEN).authorized(service.channel)
        assert ADMIN_TOKEN not in repr(Access(token=ADMIN_TOKEN))
        for kind in KINDS:
            method = getattr(channel, kind)(f"/{SERVICE}/{kind}", response_deserializer=StringValue.FromString)
            call = method(iter([b""]) if kind.startswith("stream") else b"", timeout=10)
            answers = [await call] if kind.endswith("unary") else [answer async for answer in call]
            assert [answer.value for answer in answers] == ["operations"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lists no caller"),
        ("search", "line 1: needs a name"),
        (f"search {TOKEN} use more", "line 1: needs a name"),
        ("ok 0123456789abcdef\nsearch short", "line 2: a token has at least 16"),
        (f"sea/rch {TOKEN}", "line 1: a name is"),
        (f"search {TOKEN} everything", "line 1: rights are use and admin"),
        ("search sha256:12345", "line 1: after 'sha256:'"),
        (f"a {TOKEN}\na {ADMIN_TOKEN}", "the same name"),
        (f"a {TOKEN}\nb {TOKEN}", "the same token"),
    ],
)
def test_a_wrong_file_is_refused_without_quoting_it(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_callers(path, flag="--tokens-file")
    assert expected in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokens-file .*missing: No such file"):
        read_callers(tmp_path / "missing", flag="--tokens-file")


async def test_changed_tokens_count_and_broken_ones_change_nothing(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "LOOK_INTERVAL_S", 0.0)
    another = "another-token-0123456789"
    old, new = ([("authorization", f"Bearer {token}")] for token in (TOKEN, another))
    write, remove = tokens.write_text, tokens.unlink
    with capture_logs() as logs:
        async with serving(interceptors=[_interceptor(tokens)], unary_unary=_once) as service:
            assert await service.call("unary_unary", metadata=old, timeout=10) == ["search"]
            write(f"batch {another}\n")
            assert type(await _refusal(service, "unary_unary", *old)) is Unauthenticated
            assert await service.call("unary_unary", metadata=new, timeout=10) == ["batch"]
            write(f"batch {another}\nsearch short\n")
            assert await service.call("unary_unary", metadata=new, timeout=10) == ["batch"]
            remove()
            assert await service.call("unary_unary", metadata=new, timeout=10) == ["batch"]
            write(f"search {TOKEN}\n")
            assert await service.call("unary_unary", metadata=old, timeout=10) == ["search"]
    (said,) = (entry for entry in logs if entry["log_level"] == "error")
    assert "line 2: a token has at least 16" in said["error"]
    assert "put them right" in said["advice"]


async def test_shared_secrets_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("new-secret-0123456789\nold-secret-0123456789\n")
    secrets = read_shared_secrets(path, flag="--worker-secret-file")
    assert secrets[0] == "new-secret-0123456789"
    interceptor = CallerInterceptor(lambda: callers_with_secrets("router", secrets))
    async with serving(interceptors=[interceptor], unary_unary=_once) as service:
        for secret in secrets:
            metadata = [("authorization", f"Bearer {secret}")]
            assert await service.call("unary_unary", metadata=metadata, timeout=10) == ["router"]
        assert type(await _refusal(service, "unary_unary")) is Unauthenticated
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_shared_secrets(path, flag="--worker-secret-file")
