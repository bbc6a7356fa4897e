"""One prompt on a prefill worker, as the router sees it: a grant goes in, a first token and a hand-over come out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from twinstage.errors import InternalError, WorkerLost
from twinstage.rpc.convert_worker import kv_grant_to_proto, prompt_logprobs_from_proto, token_chunk_from_proto
from twinstage.types import KvGrant, PromptLogprobs, TokenChunk
from twinstage.worker.v1 import worker_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenEvent:
    """The first token of every choice, in order; a chunk's `finish` is set where it is also the last.

    `prompt_logprobs` are those of the prompt's own tokens, in order, where they were asked for.
    """

    chunks: tuple[TokenChunk, ...]
    queue_s: float
    prefill_s: float
    cached_prompt_tokens: int
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOverEvent:
    """The decode worker has acknowledged the KV blocks."""

    transport: str
    kv_bytes: int
    transfer_s: float


class PrefillCall:
    """One prompt on a prefill worker: `give` the grant if it follows, await `first_token`, then `handed_over`."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
        outgoing: asyncio.Queue[worker_pb2.PrefillRequest | None],
        *,
        address: str,
        translated: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`outgoing` is what the call still sends; `translated` turns what gRPC raises into errors of Twinstage."""
        self._call = call
        self._outgoing = outgoing
        self._address = address
        self._translated = translated

    def give(self, grant: KvGrant) -> None:
        """The grant of a call that was started without: the worker begins."""
        self._outgoing.put_nowait(worker_pb2.PrefillRequest(grant=kv_grant_to_proto(grant)))

    @contextlib.asynccontextmanager
    async def unless_over(self) -> AsyncIterator[None]:
        """A block that ends with the call's error when the worker ends the call, or is lost, meanwhile.

        For the time before the grant: nobody reads from the call then, and who waits for decode would not notice.
        """
        is_inside = True

        def end(_: object) -> None:
            if is_inside:  # gRPC takes no callback back, and every call ends at some time
                scope.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as scope:
                self._call.add_done_callback(end)
                try:
                    yield
                finally:
                    is_inside = False
        except TimeoutError:
            if not scope.expired():
                raise
            await self._read("first_token")
            raise InternalError(f"the worker at {self._address} began a prefill without a grant") from None

    async def _read(self, event: str, *others: str) -> worker_pb2.PrefillResponse:
        """The next message, which brings `event` or one of `others` that may come before it."""
        with self._translated():
            message = await self._call.read()
        if not isinstance(message, worker_pb2.PrefillResponse):
            raise WorkerLost(f"the worker at {self._address} ended a prefill without its {event}")
        if message.WhichOneof("event") not in (event, *others):
            raise InternalError(f"the prefill worker sent {message.WhichOneof('event')} in the place of {event}")
        return message

    async def first_token(self) -> FirstTokenEvent:
        prompt_logprobs: list[PromptLogprobs] = []
        while True:
            message = await self._read("first_token", "prompt_logprobs")
            if message.HasField("first_token"):
                break
            with self._translated():
                prompt_logprobs.append(prompt_logprobs_from_proto(message.prompt_logprobs))
        event = message.first_token
        with self._translated():
            chunks = tuple(map(token_chunk_from_proto, (event.chunk, *event.other_chunks)))
        return FirstTokenEvent(
            chunks=chunks,
            queue_s=event.queue_us / 1e6,
            prefill_s=event.prefill_us / 1e6,
            cached_prompt_tokens=event.cached_prompt_tokens,
            prompt_logprobs=tuple(prompt_logprobs),
        )

    async def handed_over(self) -> HandedOverEvent:
        event = (await self._read("handed_over")).handed_over
        return HandedOverEvent(transport=event.transport, kv_bytes=event.kv_bytes, transfer_s=event.transfer_us / 1e6)
