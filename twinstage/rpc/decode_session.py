"""The one stream that carries every token of a decode worker to this router, and what each request gets from it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from twinstage.errors import DeadlineExceeded, TwinstageError, WorkerLost
from twinstage.rpc.convert_worker import kv_grant_from_proto, sequence_spec_to_proto, token_chunk_from_proto
from twinstage.rpc.sequence_totals import SequenceTotals, sequence_totals_from_proto
from twinstage.rpc.status import error_from_reason
from twinstage.types import KvEndpoint, KvGrant, RequestId, SequenceSpec, TokenChunk
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

MAX_UNSENT = 8192  # messages; a worker that takes none of so many is lost
BEATS = 4  # signs of life within the time after which the worker takes a silent router for lost
ANSWER_MARGIN_S = 1.0  # by which a worker's own word that the deadline is over may be late


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeUpdate:
    """All that a decode worker has said about a request since the last update: at most one chunk for each choice."""

    chunks: tuple[TokenChunk, ...]
    totals: SequenceTotals | None


class DecodeSubscription:
    """What a decode worker says about one request, for one reader. Tokens that nobody has read yet are joined."""

    def __init__(self, request_id: RequestId, *, end_choice: Callable[[RequestId, int], None]) -> None:
        self.request_id = request_id
        self._end_choice = end_choice
        self._chunks: dict[int, TokenChunk] = {}  # by choice
        self._totals: SequenceTotals | None = None
        self._error: TwinstageError | None = None
        self._news = asyncio.Event()
        self._broken = asyncio.Event()
        self._on_failure: Callable[[TwinstageError], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the worker holds nothing of the request any more."""
        return self._totals is not None or self._error is not None

    async def receive(self) -> DecodeUpdate:
        """Wait for news. Raises what the worker reported, or WorkerLost, once all tokens before it have been read."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        update = DecodeUpdate(chunks=tuple(self._chunks.values()), totals=self._totals)
        self._chunks.clear()
        return update

    def end_choice(self, choice_index: int) -> None:
        """Let the worker end one choice of the request; the others go on."""
        self._end_choice(self.request_id, choice_index)

    async def broken(self) -> NoReturn:
        """Wait until the request fails on the worker, and raise why."""
        await self._broken.wait()
        assert self._error is not None
        raise self._error

    @contextlib.contextmanager
    def hearing_failure(self, on_failure: Callable[[TwinstageError], None]) -> Iterator[None]:
        """Let `on_failure` hear when the request fails on the worker within the block, or has failed before it."""
        if self._error is not None:
            on_failure(self._error)
        self._on_failure = on_failure
        try:
            yield
        finally:
            self._on_failure = None

    def add_chunk(self, chunk: TokenChunk) -> None:
        if (unread := self._chunks.get(chunk.choice_index)) is not None:
            chunk = replace(chunk, tokens=(*unread.tokens, *chunk.tokens))
        self._chunks[chunk.choice_index] = chunk
        self._news.set()

    def set_totals(self, totals: SequenceTotals) -> None:
        self._totals = totals

    def fail(self, error: TwinstageError) -> None:
        if not self.ended:
            self._error = error
            self._news.set()
            self._broken.set()
            if self._on_failure is not None:
                self._on_failure(error)


class DecodeSession:
    """This router's stream on a decode worker. When it ends, the worker frees all that belongs to it."""

    def __init__(
        self,
        stub: worker_pb2_grpc.DecodeServiceAsyncStub,
        *,
        address: str,
        translated: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`translated` is the connection's own: it turns what gRPC raises into our errors."""
        self.session_id = uuid.uuid4().hex
        self._address = address
        self._translated = translated
        self._subscriptions: dict[RequestId, DecodeSubscription] = {}
        self._reserving: dict[RequestId, asyncio.Future[worker_pb2.SessionGrant]] = {}
        self._outgoing: asyncio.Queue[worker_pb2.SessionRequest | None] = asyncio.Queue()  # see `_send`
        self._beat_s: float | None = None  # between signs of life, once the worker has said how often it wants them
        self._lost: TwinstageError | None = None  # why the session is closed
        self._call = stub.Session(self._requests())

    async def _requests(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(open=worker_pb2.SessionOpen(session_id=self.session_id))
        alive = worker_pb2.SessionRequest(alive=worker_pb2.SessionAlive())
        while True:
            request: worker_pb2.SessionRequest | None = alive
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    request = await self._outgoing.get()
            if request is None:
                return
            yield request

    async def open(self) -> None:
        with self._translated():
            message = await self._call.read()
        if not isinstance(message, worker_pb2.SessionResponse) or message.WhichOneof("message") != "opened":
            raise WorkerLost(f"the worker at {self._address} did not open the session")
        if lease_ms := message.opened.lease_ms:
            self._beat_s = lease_ms / 1000 / BEATS
            self._outgoing.put_nowait(worker_pb2.SessionRequest(alive=worker_pb2.SessionAlive()))

    def close(self, error: TwinstageError | None = None) -> None:
        """End the session; every subscriber gets `error`. Idempotent."""
        if self._lost is not None:
            return
        self._lost = error or WorkerLost(f"the worker at {self._address} is lost")
        self._call.cancel()
        self._outgoing.put_nowait(None)  # a call that has ended already does not end the task that sends its requests
        for subscription in tuple(self._subscriptions.values()):
            subscription.fail(self._lost)
        for request_id in tuple(self._reserving):
            self._refuse(request_id, self._lost)

    async def run(self) -> NoReturn:
        """Hand out what the worker says until the stream ends, which it does with an error."""
        error: TwinstageError = WorkerLost(f"the worker at {self._address} ended the session")
        try:
            while True:
                with self._translated():
                    message = await self._call.read()
                    if not isinstance(message, worker_pb2.SessionResponse):
                        raise error
                    self._dispatch(message)
        except TwinstageError as raised:
            error = raised
            raise
        finally:
            self.close(error)

    def _dispatch(self, message: worker_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            self._dispatch_step(message.step)
        elif kind == "failure":
            request_id = RequestId(message.failure.request_id)
            error = error_from_reason(message.failure.reason, message.failure.message)
            self._refuse(request_id, error)
            if (subscription := self._subscriptions.get(request_id)) is not None:
                subscription.fail(error)
        elif kind == "grant":
            waiting = self._reserving.get(RequestId(message.grant.request_id))
            if waiting is not None and not waiting.done():
                waiting.set_result(message.grant)

    def _refuse(self, request_id: RequestId, error: TwinstageError) -> None:
        """Fail a reservation that waits, if there is one."""
        waiting = self._reserving.get(request_id)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _dispatch_step(self, step: worker_pb2.SessionStep) -> None:
        # Totals first: a reader that sees the finish of a request finds its totals beside it.
        for totals in step.totals:
            subscription = self._subscriptions.get(RequestId(totals.request_id))
            if subscription is not None:
                subscription.set_totals(sequence_totals_from_proto(totals))
        for chunk in step.chunks:
            subscription = self._subscriptions.get(RequestId(chunk.request_id))
            if subscription is not None:
                subscription.add_chunk(token_chunk_from_proto(chunk))

    @contextlib.contextmanager
    def subscribe(self, request_id: RequestId) -> Iterator[DecodeSubscription]:
        """Listen to one request. Leaving the block ends the request on the worker unless it has ended there.

        On a session that is closed the subscription has failed from the start.
        """
        subscription = DecodeSubscription(request_id, end_choice=self.abort)
        if self._lost is not None:
            subscription.fail(self._lost)
        self._subscriptions[request_id] = subscription
        try:
            yield subscription
        finally:
            del self._subscriptions[request_id]
            if not subscription.ended:
                self.abort(request_id)

    def abort(self, request_id: RequestId, choice_index: int | None = None) -> None:
        """End a request, or one choice of it, on the worker. Unknown and finished ones are ignored there."""
        if self._lost is None:
            abort = worker_pb2.SessionAbort(request_id=request_id, choice_index=choice_index)
            self._send(worker_pb2.SessionRequest(abort=abort))

    def _send(self, message: worker_pb2.SessionRequest) -> None:
        """Queue a message. Requests come and go while a worker does not read, so their number is no limit."""
        if self._outgoing.qsize() >= MAX_UNSENT:
            self.close(WorkerLost(f"the worker at {self._address} has not read {MAX_UNSENT} messages"))
        else:
            self._outgoing.put_nowait(message)

    async def reserve(self, spec: SequenceSpec, *, deadline_s: float) -> tuple[KvGrant, float]:
        """Reserve blocks, waiting at most `deadline_s` seconds. Returns the grant and the seconds it waited.

        Who stops waiting before gives the blocks back. Raises what the worker answers, DeadlineExceeded or WorkerLost.
        """
        with self.reserving(spec, deadline_s=deadline_s) as reservation:
            return await reservation.granted()

    @contextlib.contextmanager
    def reserving(self, spec: SequenceSpec, *, deadline_s: float) -> Iterator[Reservation]:
        """Ask for blocks, to wait for them in the block. Leaving it without them withdraws the wish."""
        if self._lost is not None:
            raise self._lost
        request = worker_pb2.SessionReserve(
            sequence=sequence_spec_to_proto(spec), deadline_ms=max(1, round(deadline_s * 1000))
        )
        waiting = self._reserving[spec.request_id] = asyncio.get_running_loop().create_future()
        self._send(worker_pb2.SessionRequest(reserve=request))
        try:
            yield Reservation(waiting, address=self._address, timeout_s=deadline_s + ANSWER_MARGIN_S)
        finally:
            del self._reserving[spec.request_id]
            if not waiting.done() or waiting.cancelled():
                waiting.cancel()
                self.abort(spec.request_id)
            else:
                waiting.exception()  # nobody may have come to hear it


class Reservation:
    """Blocks of a decode worker that were asked for."""

    def __init__(self, waiting: asyncio.Future[worker_pb2.SessionGrant], *, address: str, timeout_s: float) -> None:
        self._waiting = waiting
        self._address = address
        self._timeout_s = timeout_s

    async def granted(self) -> tuple[KvGrant, float]:
        """The grant, and the seconds the worker waited for blocks. As `DecodeSession.reserve`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._waiting
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the worker at {self._address} did not answer in {self._timeout_s:.3f} s"
            ) from error
        grant = kv_grant_from_proto(response.grant)
        host = self._address.rpartition(":")[0]
        endpoints = tuple(_with_host(endpoint, host) for endpoint in grant.endpoints)
        return replace(grant, endpoints=endpoints), response.queue_us / 1e6


def _with_host(endpoint: KvEndpoint, host: str) -> KvEndpoint:
    """Put the host at which the router reaches the worker into an address that leaves it out."""
    if endpoint.transport != "shm" and endpoint.address.startswith(":"):
        return replace(endpoint, address=host + endpoint.address)
    return endpoint
