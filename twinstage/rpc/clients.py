"""The router's side of the worker protocol: one connection per worker, and one session per decode worker.

    WorkerConnection   a channel: describe, watch_load, tokenizer_bundle, encode, prefill, open_session
    PrefillCall        one prompt on a prefill worker: first_token(), then handed_over()
    DecodeSession      the one stream that carries every token of a decode worker; reserve() takes blocks
    DecodeSubscription what one request gets from that stream

Every failure comes out as a TwinstageError. A connection that was closed because its worker is lost ends all calls on
it with WorkerLost, never with a CancelledError: that one is left to whoever cancels the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from twinstage.errors import InternalError, WorkerLost
from twinstage.rpc.access import OPEN_ACCESS, Access
from twinstage.rpc.convert_description import worker_description_from_proto, worker_load_from_proto
from twinstage.rpc.convert_pooling import pooling_input_to_proto, worker_pooling_task_to_proto
from twinstage.rpc.convert_worker import kv_grant_to_proto, sequence_spec_to_proto
from twinstage.rpc.decode_session import DecodeSession, DecodeSubscription, DecodeUpdate, Reservation
from twinstage.rpc.prefill_call import FirstTokenEvent, HandedOverEvent, PrefillCall
from twinstage.rpc.protocol import MAX_MESSAGE_BYTES
from twinstage.rpc.sequence_totals import SequenceTotals
from twinstage.rpc.status import error_from_rpc
from twinstage.types import (
    KvGrant,
    PoolingInput,
    PoolingTask,
    SequenceSpec,
    WorkerDescription,
    WorkerLoad,
)
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

Message = TypeVar("Message")

__all__ = [
    "DecodeSession",
    "DecodeSubscription",
    "DecodeUpdate",
    "EncodedBatch",
    "FirstTokenEvent",
    "HandedOverEvent",
    "PrefillCall",
    "Reservation",
    "SequenceTotals",
    "WorkerConnection",
]

SILENT_INTERVALS = 3  # a worker that reports no load for so many intervals is lost

_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Reconnecting is the worker table's business: without a pool of its own, a new channel would inherit the back-off
    # of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The results of a batch in input order: vectors as little-endian 32-bit floats, or the scores of pairs."""

    vectors: tuple[bytes, ...]
    queue_s: float
    compute_s: float
    scores: tuple[float, ...] = ()


class WorkerConnection:
    """A channel to one worker, from the first contact until the worker is lost."""

    def __init__(self, address: str, access: Access = OPEN_ACCESS) -> None:
        self.address = address
        self._channel = access.open_aio(address, _CHANNEL_OPTIONS)
        channel = access.authorized(self._channel)
        self._closed = False
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._prefill = worker_pb2_grpc.PrefillServiceStub(channel)
        self._decode = worker_pb2_grpc.DecodeServiceStub(channel)

    async def close(self) -> None:
        """End every call on the connection with WorkerLost. Idempotent."""
        self._closed = True
        await self._channel.close(None)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn what gRPC raises into the errors of Twinstage."""
        if self._closed:
            raise WorkerLost(f"the worker at {self.address} is lost")
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling() > 0):
                raise
            raise WorkerLost(f"the worker at {self.address} is lost") from error
        except ValueError as error:  # an enumeration of another version, from convert_worker
            raise InternalError(f"the worker at {self.address} speaks another version: {error}") from error

    async def describe(self, *, timeout_s: float) -> WorkerDescription:
        with self.translated():
            return worker_description_from_proto(
                await self._worker.Describe(worker_pb2.DescribeRequest(), timeout=timeout_s)
            )

    async def watch_load(self, *, interval_s: float) -> AsyncGenerator[WorkerLoad, None]:
        """The worker's load, again and again. Raises WorkerLost when it is silent for three intervals."""
        call = self._worker.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=round(interval_s * 1000)))
        try:
            while True:
                message = await self._read_unless_silent(call, interval_s)
                if not isinstance(message, worker_pb2.WatchLoadResponse):
                    raise WorkerLost(f"the worker at {self.address} ended its load reports")
                yield worker_load_from_proto(message)
        finally:
            call.cancel()

    async def _read_unless_silent(
        self, call: grpc.aio.UnaryStreamCall[Any, worker_pb2.WatchLoadResponse], interval_s: float
    ) -> object:
        """The next message. Raises WorkerLost after three intervals without one.

        The intervals are waited for one by one: should this process itself have been held up, that costs one of them,
        and the messages that have arrived meanwhile are read in the next.
        """
        reading = asyncio.ensure_future(call.read())
        try:
            for _ in range(SILENT_INTERVALS):
                await asyncio.wait({reading}, timeout=interval_s)
                if reading.done():
                    with self.translated():
                        return await reading
        finally:
            reading.cancel()
        raise WorkerLost(f"the worker at {self.address} was silent for {SILENT_INTERVALS * interval_s:g} s")

    async def tokenizer_bundle(self, fingerprint: str, *, timeout_s: float) -> bytes:
        """The serialized tokenizer bundle that the worker's description names."""
        request = worker_pb2.GetTokenizerBundleRequest(fingerprint=fingerprint)
        with self.translated():
            call = self._worker.GetTokenizerBundle(request, timeout=timeout_s)
            try:
                return b"".join([piece.data async for piece in call])
            finally:
                call.cancel()  # of itself it would go on when this task is cancelled before it reads

    async def encode(
        self,
        request_id: str,
        inputs: Sequence[PoolingInput],
        *,
        task: PoolingTask = PoolingTask.EMBED,
        normalize: bool = True,
        timeout_s: float,
    ) -> EncodedBatch:
        """Run a pooling model. Raises TaskNotSupported when the worker's model cannot do `task`."""
        request = worker_pb2.EncodeRequest(
            request_id=request_id,
            inputs=[pooling_input_to_proto(entry) for entry in inputs],
            normalize=normalize,
            task=worker_pooling_task_to_proto(task),
        )
        with self.translated():
            response = await self._prefill.Encode(request, timeout=timeout_s)
        num_results = len(response.scores if task is PoolingTask.SCORE else response.vectors)
        if num_results != len(inputs):
            raise InternalError(f"the worker returned {num_results} results for {len(inputs)} inputs")
        return EncodedBatch(
            vectors=tuple(response.vectors),
            scores=tuple(response.scores),
            queue_s=response.queue_us / 1e6,
            compute_s=response.compute_us / 1e6,
        )

    async def reset_prefix_cache(self, *, timeout_s: float) -> int:
        """Let the worker forget what is in its KV blocks; returns how many it forgot."""
        with self.translated():
            request = worker_pb2.ResetPrefixCacheRequest()
            return (await self._worker.ResetPrefixCache(request, timeout=timeout_s)).dropped_blocks

    async def drain(self, *, timeout_s: float) -> None:
        """Let the worker take nothing new and finish what it has."""
        with self.translated():
            await self._worker.Drain(worker_pb2.DrainRequest(), timeout=timeout_s)

    async def undrain(self, *, timeout_s: float) -> None:
        """Let the worker take requests again. Raises Draining when its process ends."""
        with self.translated():
            await self._worker.Undrain(worker_pb2.UndrainRequest(), timeout=timeout_s)

    @contextlib.contextmanager
    def prefill(
        self, spec: SequenceSpec, grant: KvGrant | None, *, timeout_s: float, grant_follows: bool = False
    ) -> Iterator[PrefillCall]:
        """Start a prefill. Leaving the block ends whatever of it still goes on.

        With `grant_follows` the call is set up, and the worker does nothing until `give` brings the grant.
        """
        request = worker_pb2.PrefillRequest(
            sequence=sequence_spec_to_proto(spec),
            grant=kv_grant_to_proto(grant) if grant is not None else None,
            grant_follows=grant_follows,
        )
        outgoing: asyncio.Queue[worker_pb2.PrefillRequest | None] = asyncio.Queue()
        outgoing.put_nowait(request)
        with self.translated():
            call = self._prefill.Prefill(_until_none(outgoing), timeout=timeout_s)
        try:
            yield PrefillCall(call, outgoing, address=self.address, translated=self.translated)
        finally:
            call.cancel()
            outgoing.put_nowait(None)  # a call that has ended already does not end the task that sends its requests

    async def open_session(self, *, timeout_s: float) -> DecodeSession:
        """Open this router's session on a decode worker."""
        session = DecodeSession(self._decode, address=self.address, translated=self.translated)
        try:
            async with asyncio.timeout(timeout_s):
                await session.open()
        except TimeoutError as error:
            session.close()
            raise WorkerLost(f"the worker at {self.address} opened no session within {timeout_s:g} s") from error
        except BaseException:
            session.close()
            raise
        return session


async def _until_none(outgoing: asyncio.Queue[Message | None]) -> AsyncIterator[Message]:
    """What is put into the queue. To say that nothing follows would be one more send, so that waits for the end."""
    while (message := await outgoing.get()) is not None:
        yield message
