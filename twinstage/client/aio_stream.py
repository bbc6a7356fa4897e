"""Running generations, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from twinstage.client.channel import error_of
from twinstage.client.results import Delta, PromptInfo, PromptLogprobs, Summary
from twinstage.client.retry import Attempts
from twinstage.client.stream_state import StreamEvent, StreamState
from twinstage.errors import Cancelled
from twinstage.types import ChatMessage


class AsyncGenerationStream:
    """A running generation: iterate over its deltas. Leaving the scope early cancels it."""

    def __init__(self, start: Callable[[float | None], Any], attempts: Attempts, address: str) -> None:
        """`start` makes the call, with the time that it may take; it is made at once, and again as `attempts` allow."""
        self._start = start
        self._attempts = attempts
        self._address = address
        self._state = StreamState()
        self._cancelled = False
        self._begin()

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = self._start(self._attempts.timeout_s)
        self._events = aiter(self._call)

    def __del__(self) -> None:
        """Cancel what nobody can read any more, as gRPC itself does only with blocking calls."""
        call = getattr(self, "_call", None)
        if call is not None and not call.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all is over
                self._loop.call_soon_threadsafe(call.cancel)

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

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            event = await self._next_event()
            if event is None:
                continue
            delta = self._state.take(event)
            if delta is not None:
                return delta

    async def _next_event(self) -> StreamEvent | None:
        """The next event; None when the call was made again."""
        try:
            event: StreamEvent = await anext(self._events)
        except StopAsyncIteration:
            self._state.check_complete()
            raise
        except grpc.RpcError as error:
            await self._again_or_raise(error)
            return None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the stream was cancelled") from error  # by our own `cancel`: the task goes on
        return event

    async def _again_or_raise(self, error: grpc.RpcError) -> None:
        began = self._state.began
        pause_s = None if began or self._cancelled else self._attempts.pause_s(error)
        if pause_s is None:
            raise error_of(error, self._address, began=began) from error
        await asyncio.sleep(pause_s)
        self._begin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()
