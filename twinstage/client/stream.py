"""Running generations, for blocking callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from twinstage.client.channel import error_of
from twinstage.client.results import Delta, PromptInfo, PromptLogprobs, Summary
from twinstage.client.retry import Attempts
from twinstage.client.stream_state import StreamEvent, StreamState
from twinstage.types import ChatMessage


class StreamingCall(Protocol):
    """The part of a gRPC call that a stream uses."""

    def __iter__(self) -> Iterator[StreamEvent]: ...

    def cancel(self) -> None: ...


class GenerationStream:
    """A running generation: iterate over its deltas. Leaving the scope early cancels it.

    `prompt_info` is known once the first delta is, `summary` when the iteration has ended.
    """

    def __init__(self, start: Callable[[float | None], StreamingCall], attempts: Attempts, address: str) -> None:
        """`start` makes the call, with the time that it may take; it is made at once, and again as `attempts` allow."""
        self._start = start
        self._attempts = attempts
        self._address = address
        self._state = StreamState()
        self._cancelled = False
        self._begin()

    def _begin(self) -> None:
        self._call = self._start(self._attempts.timeout_s)
        self._events = iter(self._call)

    @property
    def prompt_info(self) -> PromptInfo | None:
        return self._state.prompt_info

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Those that came so far: in parts, each before the first delta."""
        return tuple(self._state.prompt_logprobs)

    @property
    def summary(self) -> Summary | None:
        return self._state.summary

    def message(self, index: int = 0) -> ChatMessage:
        """What has come of an answer, as a message that can be sent back once the stream has ended."""
        return self._state.message(index)

    def cancel(self) -> None:
        """Tell the router that nobody waits any more; harmless when the stream has ended."""
        self._cancelled = True
        self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                event = next(self._events)
            except StopIteration:
                self._state.check_complete()
                raise
            except grpc.RpcError as error:
                self._again_or_raise(error)
                continue
            delta = self._state.take(event)
            if delta is not None:
                return delta

    def _again_or_raise(self, error: grpc.RpcError) -> None:
        began = self._state.began
        pause_s = None if began or self._cancelled else self._attempts.pause_s(error)
        if pause_s is None:
            raise error_of(error, self._address, began=began) from error
        time.sleep(pause_s)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
