"""DecodeService: protobuf on one side, the decode worker on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from decode_worker.sessions import SequenceTotals, Session, SessionFailure, SessionGrant, SessionMessage, SessionStep
from twinstage.errors import (
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    KvExhausted,
    TwinstageError,
    WorkerLost,
)
from twinstage.rpc.convert_worker import kv_grant_to_proto, sequence_spec_from_proto, token_chunk_to_proto
from twinstage.rpc.worker_service import Loading
from twinstage.telemetry.log import get_logger
from twinstage.types import RequestId
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # it imports torch, which the process does only once its server answers
    from decode_worker.worker import DecodeWorker

logger = get_logger(__name__)

SERVICE_NAME = "twinstage.worker.v1.DecodeService"
MAX_RESERVING = 4096  # reservations of one session at once; those that wait for blocks have a limit of their own
OPEN_TIMEOUT_S = 10.0  # until a session's first message has come
LEASE_S = 10.0  # unless configured
PIECES = 4  # of a lease, each waited for alone


def add_services(server: grpc.aio.Server, loading: Loading[DecodeWorker], *, lease_s: float = LEASE_S) -> None:
    """Put the role's service on a server that has not been started."""
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(loading, lease_s=lease_s), server)


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """The sessions of routers."""

    def __init__(self, loading: Loading[DecodeWorker], *, lease_s: float) -> None:
        self._loading = loading
        self._lease_s = lease_s

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        worker = self._loading.get()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(requests, worker_pb2.SessionRequest())
        except TimeoutError as error:
            raise DeadlineExceeded(f"the session was not opened within {OPEN_TIMEOUT_S:.0f} s") from error
        if not first.open.session_id:
            raise InvalidRequest([FieldViolation("open.session_id", "the first message must open the session")])
        session = worker.open_session(first.open.session_id)
        reader = asyncio.create_task(_read(worker, session, _while_alive(requests, session, self._lease_s)))
        try:
            yield worker_pb2.SessionResponse(opened=worker_pb2.SessionOpened(lease_ms=round(1000 * self._lease_s)))
            async with aclosing(session.messages()) as messages:
                async for message in messages:
                    yield _message_to_proto(message)
        finally:
            reader.cancel()
            worker.end_session(session)


async def _while_alive(
    requests: AsyncIterator[worker_pb2.SessionRequest], session: Session, lease_s: float
) -> AsyncIterator[worker_pb2.SessionRequest]:
    """What the router says, until it says nothing for `lease_s`.

    The lease is waited for in pieces: should this process itself have been held up, that costs one of them, and what
    has arrived meanwhile is read in the next.
    """
    while True:
        reading = asyncio.ensure_future(_next(requests))
        try:
            for _ in range(PIECES):
                await asyncio.wait({reading}, timeout=lease_s / PIECES)
                if reading.done():
                    break
            else:
                logger.warning("router lost", session=session.session_id, silent_s=lease_s)
                session.close(WorkerLost(f"the router was silent for {lease_s:g} s; open a new session"))
                return
            if (request := reading.result()) is None:
                return
        finally:
            reading.cancel()
        yield request


async def _next(requests: AsyncIterator[worker_pb2.SessionRequest]) -> worker_pb2.SessionRequest | None:
    return await anext(requests, None)


async def _read(worker: DecodeWorker, session: Session, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
    """Do what the router says on its session; when it says no more, the session ends."""
    reserving = _Reserving(worker, session)
    try:
        async for request in requests:
            match request.WhichOneof("message"):
                case "reserve":
                    reserving.start(request.reserve)
                case "abort":
                    _abort(worker, session, reserving, request.abort)
                case "alive":
                    pass  # it has been heard
                case _:
                    violation = FieldViolation("message", "a session is opened once")
                    session.close(InvalidRequest([violation]))
                    return
    finally:
        reserving.cancel_all()
        worker.end_session(session)  # at once, even while a message waits for the router to read


def _abort(worker: DecodeWorker, session: Session, reserving: _Reserving, message: worker_pb2.SessionAbort) -> None:
    request_id = RequestId(message.request_id)
    if message.HasField("choice_index"):
        worker.abort(session, request_id, message.choice_index)
        return
    reserving.cancel(request_id)
    worker.abort(session, request_id)


class _Reserving:
    """The reservations of one session that are under way. One that is cancelled holds nothing."""

    def __init__(self, worker: DecodeWorker, session: Session) -> None:
        self._worker = worker
        self._session = session
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    def start(self, message: worker_pb2.SessionReserve) -> None:
        """Reserve, and tell the router how it went."""
        request_id = RequestId(message.sequence.request_id)
        self.cancel(request_id)  # a router names its requests once
        if len(self._tasks) >= MAX_RESERVING:
            full = KvExhausted(f"{MAX_RESERVING} reservations of this session are under way")
            self._tell(SessionFailure(request_id=request_id, error=full))
            return
        task = self._tasks[request_id] = asyncio.create_task(self._reserve(request_id, message))
        task.add_done_callback(lambda _: self._forget(request_id, task))

    def cancel(self, request_id: RequestId) -> None:
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def cancel_all(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()

    def _forget(self, request_id: RequestId, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]

    async def _reserve(self, request_id: RequestId, message: worker_pb2.SessionReserve) -> None:
        answer: SessionMessage
        try:
            spec = sequence_spec_from_proto(message.sequence)
            grant, queue_s = await self._worker.reserve(
                self._session.session_id, spec, timeout_s=message.deadline_ms / 1000
            )
            answer = SessionGrant(request_id=request_id, grant=grant, queue_s=queue_s)
        except TwinstageError as error:
            answer = SessionFailure(request_id=request_id, error=error)
        except Exception as error:  # the outermost frame of this task: the router must not wait for nothing
            logger.error("reservation failed unexpectedly", exc_info=error)
            answer = SessionFailure(request_id=request_id, error=InternalError("the reservation failed unexpectedly"))
        self._tell(answer)

    def _tell(self, answer: SessionMessage) -> None:
        self._session.put(answer)
        if self._session.closed:  # the router does not read
            self._worker.end_session(self._session)


def _message_to_proto(message: SessionMessage) -> worker_pb2.SessionResponse:
    if isinstance(message, SessionStep):
        return worker_pb2.SessionResponse(
            step=worker_pb2.SessionStep(
                chunks=[token_chunk_to_proto(chunk) for chunk in message.chunks],
                totals=[_totals_to_proto(totals) for totals in message.totals],
            )
        )
    if isinstance(message, SessionGrant):
        return worker_pb2.SessionResponse(
            grant=worker_pb2.SessionGrant(
                request_id=message.request_id,
                grant=kv_grant_to_proto(message.grant),
                queue_us=round(message.queue_s * 1e6),
            )
        )
    return worker_pb2.SessionResponse(
        failure=worker_pb2.SessionFailure(
            request_id=message.request_id,
            reason=message.error.reason,
            message=str(message.error),
            retryable=message.error.retryable,
        )
    )


def _totals_to_proto(totals: SequenceTotals) -> worker_pb2.SequenceTotals:
    return worker_pb2.SequenceTotals(
        request_id=totals.request_id,
        queue_us=round(totals.queue_s * 1e6),
        decode_us=round(totals.decode_s * 1e6),
        kv_bytes_received=totals.kv_bytes_received,
        computed_prompt_tokens=totals.computed_prompt_tokens,
        proposed_draft_tokens=totals.proposed_draft_tokens,
        accepted_draft_tokens=totals.accepted_draft_tokens,
    )
