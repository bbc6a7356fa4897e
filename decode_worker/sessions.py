"""What goes to one router: the tokens of every engine step, and failures, in order and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from twinstage.errors import Overloaded, TwinstageError
from twinstage.types import RequestId, TokenChunk

MAX_UNREAD_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTotals:
    """What a finished request did on this worker."""

    request_id: RequestId
    queue_s: float
    decode_s: float
    kv_bytes_received: int
    computed_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStep:
    """The new tokens of one engine step, of all requests of a session, and the totals of those that ended with it."""

    chunks: tuple[TokenChunk, ...]
    totals: tuple[SequenceTotals, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """A request failed on this worker."""

    request_id: RequestId
    error: TwinstageError


SessionMessage = SessionStep | SessionFailure


class Session:
    """A router's stream. It fails when the router reads so slowly that `MAX_UNREAD_MESSAGES` messages pile up."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._unread: deque[SessionMessage] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._error: TwinstageError | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: SessionMessage) -> None:
        """Queue `message`; dropped when the session is closed."""
        if self._closed:
            return
        if len(self._unread) >= MAX_UNREAD_MESSAGES:
            self._unread.clear()
            self.close(Overloaded(f"the router has not read {MAX_UNREAD_MESSAGES} messages; the session is given up"))
            return
        self._unread.append(message)
        self._news.set()

    def close(self, error: TwinstageError | None = None) -> None:
        """Take no more messages; what is queued is still delivered, then comes `error` or a clean end. Idempotent."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._news.set()

    async def messages(self) -> AsyncGenerator[SessionMessage]:
        """The messages in order, until the session is closed. Raises the error that it was closed with."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if self._closed:
                break
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
