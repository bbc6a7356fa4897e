"""How a client of ours opens channels: plain or over TLS, with or without a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from twinstage.errors import ConfigError

AUTHORIZATION_METADATA_KEY = "authorization"
BEARER = "Bearer"

ChannelT = TypeVar("ChannelT", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a channel shows to the server. `server_name` is the name in its certificate where it is not the address's.

    Raises ConfigError for a name without credentials: whoever names a server means to be sure of it, and would be
    called in plain text; and for a token that no metadata can carry.
    The token travels in the metadata of every call: without TLS, whoever can read the network can read it.
    """

    credentials: grpc.ChannelCredentials | None = None
    token: str = field(default="", repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if self.server_name and self.credentials is None:
            raise ConfigError(f"the server name {self.server_name!r} is in a certificate, so it needs TLS credentials")
        if not self.token.isascii() or (self.token and not self.token.isprintable()):
            raise ConfigError("the token must be printable ASCII characters: has it a line break at its end?")

    def open_aio(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel for asyncio, without the token; see `authorized`."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=self._tls_options(options))

    def open(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """A blocking channel, without the token; see `authorized`."""
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=self._tls_options(options))

    def authorized(self, channel: ChannelT) -> ChannelT:
        """`channel` as stubs want it, with the token in every call."""
        if not self.token:
            return channel
        metadata = ((AUTHORIZATION_METADATA_KEY, f"{BEARER} {self.token}"),)
        return cast(ChannelT, _AuthorizedChannel(channel, metadata))

    def _tls_options(self, options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*options, *name]


OPEN_ACCESS = Access()  # plain, without a token


class _AuthorizedChannel:
    """The part of a channel that stubs use; their calls carry `metadata`.

    An interceptor would do the same for some 100 us a call, and gRPC's own call credentials refuse plain channels.
    """

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata

    def _method(self, kind: str) -> Callable[..., Any]:
        make = getattr(self._channel, kind)
        return lambda *args, **options: partial(make(*args, **options), metadata=self._metadata)

    @property
    def unary_unary(self) -> Callable[..., Any]:
        return self._method("unary_unary")

    @property
    def unary_stream(self) -> Callable[..., Any]:
        return self._method("unary_stream")

    @property
    def stream_unary(self) -> Callable[..., Any]:
        return self._method("stream_unary")

    @property
    def stream_stream(self) -> Callable[..., Any]:
        return self._method("stream_stream")
