"""Who calls, and what they may: bearer tokens, checked before anything else of a call is looked at.

A file has a caller a line: a name, the token or its SHA-256, the rights, of which `use` is the default, and quotas.

    # caller     token                                   rights, quotas
    search       nR4kYc8J1bZQ0m2t
    operations   sha256:9f86d081884c7d659a2feaa0c55ad0…   use,admin
    batch        Wq2mT7xV0kS9aL4e                        requests=8 requests-per-minute=60 tokens-per-minute=20000

Tokens are kept and compared as digests, in a time that does not depend on them, and never appear in a log or an error.
Health checks and reflection are for everybody.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog

from twinstage.errors import ConfigError, PermissionDenied, Unauthenticated
from twinstage.rpc.access import AUTHORIZATION_METADATA_KEY, BEARER
from twinstage.rpc.interceptors import ServerInterceptor

if TYPE_CHECKING:
    from twinstage.rpc.interceptors import Handler

MIN_TOKEN_CHARACTERS = 16
OPEN_SERVICES = frozenset(
    {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
)

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_caller: ContextVar[str] = ContextVar("twinstage_caller", default="")


class Right(StrEnum):
    """What a caller may do."""

    USE = "use"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most that a caller may have; None is no limit."""

    requests: int | None = None  # in progress at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers

    @property
    def limits(self) -> bool:
        """Whether it limits anything."""
        return self != NO_QUOTA


NO_QUOTA = Quota()
_QUOTA_FIELDS = {"requests", "requests_per_minute", "tokens_per_minute"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Somebody with a token, of which only the SHA-256 is kept."""

    name: str
    digest: bytes = field(repr=False)
    rights: frozenset[Right] = frozenset({Right.USE})
    quota: Quota = NO_QUOTA


def current_caller() -> str:
    """The name of who made the call that the present task serves; empty where nobody needs a token."""
    return _caller.get()


def read_callers(path: Path, *, flag: str) -> tuple[Caller, ...]:
    """The callers that a file lists. Raises ConfigError that names the line, and never quotes it: it has a token."""
    callers: list[Caller] = []
    for number, line in enumerate(_lines(path, flag), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            callers.append(_read_caller(words))
        except ValueError as error:
            raise ConfigError(f"{flag} {path}: line {number}: {error}") from None
    if not callers:
        raise ConfigError(f"{flag} {path}: lists no caller; nobody could call anything")
    for what, values in (("name", [c.name for c in callers]), ("token", [c.digest.hex() for c in callers])):
        if len(set(values)) != len(values):
            raise ConfigError(f"{flag} {path}: two callers have the same {what}")
    return tuple(callers)


def read_shared_secrets(path: Path, *, flag: str) -> tuple[str, ...]:
    """The secrets of a file, a line each: the first is shown, all of them are accepted. Raises ConfigError."""
    secrets = [line.strip() for line in _lines(path, flag) if line.strip()]
    if not secrets or not all(map(_is_token, secrets)):
        raise ConfigError(f"{flag} {path}: each line needs at least {MIN_TOKEN_CHARACTERS} visible ASCII characters")
    return tuple(secrets)


def callers_with_secrets(name: str, secrets: Sequence[str]) -> tuple[Caller, ...]:
    """Callers for shared secrets: each of them opens everything."""
    return tuple(Caller(name=name, digest=_digest(secret), rights=frozenset(Right)) for secret in secrets)


def _lines(path: Path, flag: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: is not UTF-8 text") from error


def _read_caller(words: Sequence[str]) -> Caller:
    rights = [word for word in words[2:] if "=" not in word]
    if len(words) < 2 or len(rights) > 1:
        raise ValueError("needs a name, a token and, if they are others than 'use', the rights; then quotas")
    name, token = words[0], words[1]
    if not _NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 letters, digits, or any of . _ @ -")
    if (hashed := _DIGEST.fullmatch(token)) is not None:
        digest = bytes.fromhex(hashed[1])
    elif token.startswith("sha256:"):
        raise ValueError("after 'sha256:' come 64 hexadecimal digits in small letters")
    elif _is_token(token):
        digest = _digest(token)
    else:
        raise ValueError(f"a token has at least {MIN_TOKEN_CHARACTERS} visible ASCII characters")
    allowed = rights[0].split(",") if rights else [Right.USE]
    if not set(allowed) <= set(Right):
        raise ValueError(f"rights are {' and '.join(Right)}, separated by a comma")
    quota = _read_quota([word for word in words[2:] if "=" in word])
    return Caller(name=name, digest=digest, rights=frozenset(map(Right, allowed)), quota=quota)


def _read_quota(words: Sequence[str]) -> Quota:
    limits: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        field_name = name.replace("-", "_")
        if field_name not in _QUOTA_FIELDS or field_name in limits or not number.isdecimal() or int(number) < 1:
            raise ValueError("quotas are requests=, requests-per-minute= and tokens-per-minute= with a number above 0")
        limits[field_name] = int(number)
    return Quota(**limits)


def _is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN_CHARACTERS and text.isascii() and text.isprintable() and " " not in text


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class CallerInterceptor(ServerInterceptor):
    """Lets calls through whose token is that of a caller with the right to the method.

    `callers` is asked at each call who they are; `right_for` says which right a method ("/package.Service/Method")
    needs.
    """

    def __init__(
        self, callers: Callable[[], Sequence[Caller]], *, right_for: Callable[[str], Right] = lambda _: Right.USE
    ) -> None:
        self._callers = callers
        self._right_for = right_for

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = handler_call_details.method
        if method.removeprefix("/").rpartition("/")[0] not in OPEN_SERVICES:
            caller = self._identify(handler_call_details)
            if (right := self._right_for(method)) not in caller.rights:
                raise PermissionDenied(f"{caller.name} may not call {method}: it needs the right {right.value!r}")
            # The handler runs in this very task.
            _caller.set(caller.name)
            structlog.contextvars.bind_contextvars(caller=caller.name)
        return await continuation(handler_call_details)

    def _identify(self, details: grpc.HandlerCallDetails) -> Caller:
        shown = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION_METADATA_KEY]
        if len(shown) != 1:
            raise Unauthenticated(f"send the metadata {AUTHORIZATION_METADATA_KEY!r} with '{BEARER} TOKEN', once")
        scheme, _, token = str(shown[0]).partition(" ")
        digest = _digest(token.strip()) if scheme.lower() == BEARER.lower() else b""
        found = None
        for caller in self._callers():  # all of them, so that the time says nothing about which
            if hmac.compare_digest(digest, caller.digest):
                found = caller
        if found is None:
            raise Unauthenticated("the token is not one that this server knows")
        return found
