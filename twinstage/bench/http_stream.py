"""As much HTTP/1.1 as a load generator needs: one request on a connection of its own, the body as it comes.

Own code instead of a client library, because what a message costs the generator bounds the load it can make.
Source: RFC 9112 (messages, chunked coding); WHATWG HTML, section 9.2 (event streams).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from twinstage.errors import ConfigError

_LINE_LIMIT_BYTES = 1 << 20
_BODY_LIMIT_BYTES = 16 << 20
_DATA = b"data:"


class HttpError(Exception):
    """The peer does not speak HTTP/1.1 as it should, or breaks off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens. `prefix` is the path before "/v1", mostly empty."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def parse(cls, address: str) -> Endpoint:
        """Read "host:port", "http://host:port" or "https://host/v1". Raises ConfigError."""
        try:
            parts = urlsplit(address if "://" in address else f"http://{address}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--address {address}: {error}; expected a URL such as http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--address {address}: expected a URL such as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host=parts.hostname, port=port or (443 if is_tls else 80), is_tls=is_tls, prefix=prefix)


class Response:
    """Status and body of an answer that is being read."""

    def __init__(self, reader: asyncio.StreamReader, *, status: int, headers: dict[str, str]) -> None:
        self._reader = reader
        self.status = status
        self.headers = headers

    async def body(self) -> bytes:
        """The whole body, or its first 16 MiB."""
        parts: list[bytes] = []
        size = 0
        async for part in self.parts():
            parts.append(part)
            size += len(part)
            if size > _BODY_LIMIT_BYTES:
                break
        return b"".join(parts)

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event, as it comes; of events with several data lines, each line by itself."""
        rest = b""
        async for part in self.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(_DATA):
                    yield line[len(_DATA) :].strip()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for part in self._chunks():
                yield part
            return
        length = self.headers.get("content-length")
        left = int(length) if length is not None and length.isdecimal() else None
        while left is None or left > 0:
            part = await self._reader.read(1 << 16 if left is None else min(left, 1 << 16))
            if not part:
                if left:
                    raise HttpError("the connection was closed before the end of the answer")
                return
            left = None if left is None else left - len(part)
            yield part

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size_line = await _line(self._reader)
            try:
                size = int(size_line.split(b";")[0], 16)
            except ValueError:
                raise HttpError(f"expected the size of a chunk, not {size_line[:40]!r}") from None
            if size == 0:
                return
            try:
                chunk = await self._reader.readexactly(size + 2)
            except asyncio.IncompleteReadError:
                raise HttpError("the connection was closed in the middle of the answer") from None
            yield chunk[:-2]


@contextlib.asynccontextmanager
async def http_request(
    endpoint: Endpoint, method: str, path: str, *, body: bytes | None = None
) -> AsyncIterator[Response]:
    """Send a request and read status and headers. Leaving the scope closes the connection.

    Raises OSError when the server cannot be reached, HttpError for what is no HTTP.
    """
    context = ssl.create_default_context() if endpoint.is_tls else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context, limit=_LINE_LIMIT_BYTES)
    try:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        head = [f"{method} {endpoint.prefix}{path} HTTP/1.1", f"Host: {host}:{endpoint.port}", "Connection: close"]
        head += ["Accept: */*", "User-Agent: twinstage-bench"]
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        await writer.drain()
        yield await _head(reader)
    finally:
        writer.transport.abort()  # nothing is left to be said, and a polite end of TLS may take seconds


async def _head(reader: asyncio.StreamReader) -> Response:
    status_line = await _line(reader)
    words = status_line.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise HttpError(f"expected an HTTP/1.1 status, not {status_line[:40]!r}")
    headers: dict[str, str] = {}
    while line := await _line(reader):
        name, _, value = line.partition(b":")
        headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
    return Response(reader, status=int(words[1]), headers=headers)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        raise HttpError("the connection was closed before the end of the answer") from None
    except asyncio.LimitOverrunError:
        raise HttpError("a line of the answer is longer than 1 MiB") from None
    return line.rstrip(b"\r\n")
