"""Streams that last as long as their client likes, and what ends them when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import TypeVar

from twinstage.errors import Unavailable

Message = TypeVar("Message")


async def until_ending(messages: AsyncIterable[Message], ending: asyncio.Event) -> AsyncIterator[Message]:
    """The messages of a client, until it has sent the last one. Raises Unavailable at `ending`.

    A client that keeps its stream open and says nothing would else use up the grace period of the server.
    """
    iterator = aiter(messages)
    end = asyncio.ensure_future(ending.wait())
    try:
        while True:
            reading = asyncio.ensure_future(_next(iterator))
            try:
                await asyncio.wait({reading, end}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    raise Unavailable("the server is shutting down")
                if (message := reading.result()) is None:
                    return
            finally:
                reading.cancel()
            yield message
    finally:
        end.cancel()


async def _next(iterator: AsyncIterator[Message]) -> Message | None:
    """The next message; None after the last one. A task cannot end with StopAsyncIteration."""
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        return None
