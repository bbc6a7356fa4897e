"""The outbox: events on their way from a request's flow to its client.

The flow never waits for the client. What the client has not taken yet is joined when it does, so a slow client gets
fewer and longer deltas, and no more is ever held than the request's own text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from twinstage.types import AnswerFormat, Finish, Placement, ProducedToken, PromptLogprobs, Timing, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEvent:
    """The prompt was computed; the first event of a call. `answer_format` says how the text that follows is read."""

    request_id: str
    model: str
    prompt_tokens: int
    answer_format: AnswerFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobsEvent:
    """Log probabilities of some of a prompt's own tokens; they come in order, before the first delta."""

    prompt_index: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEvent:
    """New text and tokens of one continuation."""

    index: int
    text: str
    tokens: tuple[ProducedToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent:
    """The end of one continuation."""

    index: int
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryEvent:
    """The totals; the last event of a call."""

    usage: Usage
    timing: Timing
    placement: Placement


Event = PromptEvent | PromptLogprobsEvent | DeltaEvent | FinishEvent | SummaryEvent


class Outbox:
    """Events for one reader, who takes them with `events()`."""

    def __init__(self, *watchers: Callable[[Event], None]) -> None:
        """`watchers` are told of each event as it is put."""
        self._watchers = watchers
        self._pending: deque[Event] = deque()
        self._news = asyncio.Event()
        self.num_tokens = 0  # of all deltas that were put
        self._opened = False
        self._closed = False
        self._error: BaseException | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing will be put any more."""
        return self._closed

    def open(self, event: PromptEvent) -> None:
        """Put the first event; nothing happens the next times."""
        if not self._opened:
            self._opened = True
            self.put(event)

    def put(self, event: Event) -> None:
        for watch in self._watchers:
            watch(event)
        if isinstance(event, DeltaEvent):
            self.num_tokens += len(event.tokens)
        self._pending.append(event)
        self._news.set()

    def _take(self) -> Event:
        """The next event; deltas in a row are one."""
        event = self._pending.popleft()
        if not isinstance(event, DeltaEvent):
            return event
        deltas = [event]
        while self._pending and isinstance(delta := self._pending[0], DeltaEvent) and delta.index == event.index:
            self._pending.popleft()
            deltas.append(delta)
        if len(deltas) == 1:
            return event
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        return DeltaEvent(index=event.index, text="".join(delta.text for delta in deltas), tokens=tokens)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing follows. The reader gets `error` after the events that were put before it."""
        self._closed = True
        self._error = error
        self._news.set()

    async def events(self) -> AsyncIterator[Event]:
        while True:
            while self._pending:
                yield self._take()
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._news.clear()
            await self._news.wait()
