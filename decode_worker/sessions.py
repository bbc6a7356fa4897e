"""What goes to one router: the tokens of every engine step, and failures, in order and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from twinstage.errors import AlreadyExists, Overloaded, TwinstageError, WorkerLost
from twinstage.types import KvGrant, RequestId, TokenChunk

MAX_UNREAD_MESSAGES = 4096
MAX_UNREAD_CHUNKS = 32_768  # of all steps among them; one has a token, and log probabilities where they are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceTotals:
    """What a finished request did on this worker."""

    request_id: RequestId
    queue_s: float
    decode_s: float
    kv_bytes_received: int
    computed_prompt_tokens: int
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGrant:
    """Blocks are reserved for a request, which waited `queue_s` for them."""

    request_id: RequestId
    grant: KvGrant
    queue_s: float


SessionMessage = SessionStep | SessionFailure | SessionGrant


class StepMessages:
    """The messages of one engine step while they are made, one for each session."""

    def __init__(self) -> None:
        self._parts: dict[Session, tuple[list[TokenChunk], list[SequenceTotals]]] = {}

    def add(self, session: Session, chunk: TokenChunk, totals: SequenceTotals | None) -> None:
        """A request's new tokens, and its totals if it ended with them."""
        chunks, all_totals = self._parts.setdefault(session, ([], []))
        chunks.append(chunk)
        if totals is not None:
            all_totals.append(totals)

    def messages(self) -> list[tuple[Session, SessionStep]]:
        return [
            (session, SessionStep(chunks=tuple(chunks), totals=tuple(totals)))
            for session, (chunks, totals) in self._parts.items()
        ]


class Session:
    """A router's stream. It fails when the router reads so slowly that more piles up than the two limits allow."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._unread: deque[SessionMessage] = deque()
        self._num_unread_chunks = 0
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
        num_chunks = self._num_unread_chunks + _num_chunks(message)
        if len(self._unread) >= MAX_UNREAD_MESSAGES or num_chunks > MAX_UNREAD_CHUNKS:
            why = f"the router has not read {len(self._unread)} messages; the session is given up"
            self._unread.clear()
            self.close(Overloaded(why))
            return
        self._num_unread_chunks = num_chunks
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
                message = self._unread.popleft()
                self._num_unread_chunks -= _num_chunks(message)
                yield message
            if self._closed:
                break
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error


def _num_chunks(message: SessionMessage) -> int:
    return len(message.chunks) if isinstance(message, SessionStep) else 0


class Sessions:
    """The open sessions of a worker, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str) -> Session:
        """A new session. Raises AlreadyExists."""
        if session_id in self._open:
            raise AlreadyExists(f"session {session_id} is open", resource_type="session", resource_name=session_id)
        session = self._open[session_id] = Session(session_id)
        return session

    def get(self, session_id: str) -> Session:
        """The session of that id. Raises WorkerLost when it is not open."""
        session = self._open.get(session_id)
        if session is None or session.closed:
            raise session_lost(session_id)
        return session

    def remove(self, session: Session) -> bool:
        """Close a session and forget it; whether it was known."""
        if self._open.get(session.session_id) is not session:
            return False
        del self._open[session.session_id]
        session.close()
        return True

    def close_all(self, error: TwinstageError) -> None:
        """Let every session end with `error` once what it holds is delivered."""
        for session in self._open.values():
            session.close(error)


def session_lost(session_id: str) -> WorkerLost:
    """The error of whatever belongs to a session that has ended."""
    return WorkerLost(f"session {session_id} is not open on this decode worker; open a new one")
