"""DecodeService: protobuf on one side, the decode worker on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc

from decode_worker.sessions import SequenceTotals, Session, SessionMessage, SessionStep
from twinstage.errors import DeadlineExceeded, FieldViolation, InvalidRequest
from twinstage.rpc.convert_worker import kv_grant_to_proto, sequence_spec_from_proto, token_chunk_to_proto
from twinstage.rpc.worker_service import Loading
from twinstage.types import RequestId
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # it imports torch, which the process does only once its server answers
    from decode_worker.worker import DecodeWorker

SERVICE_NAME = "twinstage.worker.v1.DecodeService"
OPEN_TIMEOUT_S = 10.0  # until a session's first message has come


def add_services(server: grpc.aio.Server, loading: Loading[DecodeWorker]) -> None:
    """Put the role's service on a server that has not been started."""
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(loading), server)


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """Session and Reserve."""

    def __init__(self, loading: Loading[DecodeWorker]) -> None:
        self._loading = loading

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
        reader = asyncio.create_task(_read(worker, session, requests))
        try:
            yield worker_pb2.SessionResponse(opened=worker_pb2.SessionOpened())
            async with aclosing(session.messages()) as messages:
                async for message in messages:
                    yield _message_to_proto(message)
        finally:
            reader.cancel()
            worker.end_session(session)

    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Any) -> worker_pb2.ReserveResponse:  # noqa: N802
        worker = self._loading.get()
        grant, queue_s = await worker.reserve(
            request.session_id,
            sequence_spec_from_proto(request.sequence),
            timeout_s=request.deadline_ms / 1000,
        )
        return worker_pb2.ReserveResponse(grant=kv_grant_to_proto(grant), queue_us=round(queue_s * 1e6))


async def _read(worker: DecodeWorker, session: Session, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
    """Do what the router says on its session; when it says no more, the session ends."""
    try:
        async for request in requests:
            if request.WhichOneof("message") != "abort":
                violation = FieldViolation("message", "only aborts may follow the opening of a session")
                session.close(InvalidRequest([violation]))
                return
            worker.abort(session, RequestId(request.abort.request_id))
    finally:
        worker.end_session(session)  # at once, even while a message waits for the router to read


def _message_to_proto(message: SessionMessage) -> worker_pb2.SessionResponse:
    if isinstance(message, SessionStep):
        return worker_pb2.SessionResponse(
            step=worker_pb2.SessionStep(
                chunks=[token_chunk_to_proto(chunk) for chunk in message.chunks],
                totals=[_totals_to_proto(totals) for totals in message.totals],
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
    )
