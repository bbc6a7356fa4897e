"""What the generator needs of a server, whatever it speaks: one request in, tokens out, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twinstage.client.options import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its server describes it; None where the server does not say."""

    name: str
    max_model_len: int | None = None
    vocabulary_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request. `prompt` is text, or token ids to be used as they are."""

    prompt: str | Sequence[int]
    model: str
    output_tokens: int
    sampling: Sampling
    ignore_eos: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server says of a request at its end; None where it does not say. `phases_s` are seconds by phase."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_prompt_tokens: int = 0
    kv_bytes: int = 0
    retries: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)


class RequestFailed(Exception):
    """A request failed: the protocol's code, the server's reason, and what it said."""

    def __init__(self, message: str, *, code: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class TokenSink(Protocol):
    """Where a driver says that tokens arrived, at the moment when they did."""

    def tokens(self, count: int) -> None: ...


class Target(Protocol):
    """One server."""

    @property
    def address(self) -> str: ...

    async def model(self, name: str) -> ServedModel:
        """The model of this name, or the only one. Raises TwinstageError saying what to do."""
        ...

    async def count_tokens(self, text: str, model: str) -> int:
        """How many tokens the server makes of a prompt. Raises TwinstageError."""
        ...

    async def send(self, request: LoadRequest, sink: TokenSink) -> Answer:
        """Send one request and read its answer to the end. Raises RequestFailed."""
        ...

    async def close(self) -> None: ...
