"""PrefillService: protobuf on one side, the prefill worker on the other."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import grpc

from prefill_worker.events import FirstToken, PrefillEvent
from twinstage.errors import DeadlineExceeded, FieldViolation, InvalidRequest, TaskNotSupported
from twinstage.rpc.convert_pooling import pooling_input_from_proto, worker_pooling_task_from_proto
from twinstage.rpc.convert_worker import (
    kv_grant_from_proto,
    prompt_logprobs_to_proto,
    sequence_spec_from_proto,
    token_chunk_to_proto,
)
from twinstage.rpc.worker_service import Loading
from twinstage.types import POOLING_TASKS, PromptLogprobs, Task
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:  # they import torch, which the process does only once its server answers
    from prefill_worker.embedding import EmbeddingWorker
    from prefill_worker.worker import PrefillWorker

REQUEST_TIMEOUT_S = 10.0  # until a call's first message has come; the grant that follows it comes when it can
_SCORE = struct.Struct("<f")
SERVICE_NAME = "twinstage.worker.v1.PrefillService"


def add_services(server: grpc.aio.Server, loading: Loading[PrefillWorker | EmbeddingWorker]) -> None:
    """Put the role's service on a server that has not been started."""
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(loading), server)


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Prefill on a generative model, Encode on a pooling model; the other is refused."""

    def __init__(self, loading: Loading[PrefillWorker | EmbeddingWorker]) -> None:
        self._loading = loading

    async def Prefill(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.PrefillRequest], context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        worker = cast("PrefillWorker", self._worker(Task.GENERATE))
        # A call that ends before its request is read is an internal error to the client's gRPC, whatever its status.
        request = await _first(requests)
        async with worker.arrivals.waiting():
            spec = sequence_spec_from_proto(request.sequence)
            matcher = await worker.matcher_for(spec)
            if request.grant_follows:  # the decode worker is still reserving
                request = await anext(requests, request)
                if not request.HasField("grant"):
                    raise InvalidRequest([FieldViolation("grant", "was to follow the request, and did not")])
        grant = kv_grant_from_proto(request.grant) if request.HasField("grant") else None
        async with aclosing(worker.prefill(spec, grant, matcher=matcher)) as events:
            async for event in events:
                yield _event_to_proto(event)

    async def Encode(self, request: worker_pb2.EncodeRequest, context: Any) -> worker_pb2.EncodeResponse:  # noqa: N802
        worker = cast("EmbeddingWorker", self._worker(*POOLING_TASKS))
        inputs = [pooling_input_from_proto(entry) for entry in request.inputs]
        task = worker_pooling_task_from_proto(request.task)
        encoded = await worker.encode(inputs, task=task, normalize=request.normalize)
        scores = worker.description.model.task is Task.SCORE
        return worker_pb2.EncodeResponse(
            vectors=() if scores else encoded.vectors,
            scores=[score for (score,) in map(_SCORE.unpack, encoded.vectors)] if scores else (),
            queue_us=round(encoded.queue_s * 1e6),
            compute_us=round(encoded.compute_s * 1e6),
        )

    def _worker(self, *tasks: Task) -> PrefillWorker | EmbeddingWorker:
        worker = self._loading.get()
        model = worker.description.model
        if model.task not in tasks:
            wanted = " or ".join(task.value for task in tasks)
            raise TaskNotSupported(f"model {model.name} is for {model.task.value}, not for {wanted}")
        return worker


async def _first(requests: AsyncIterator[worker_pb2.PrefillRequest]) -> worker_pb2.PrefillRequest:
    """The first message, empty when there is none. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await anext(requests, worker_pb2.PrefillRequest())
    except TimeoutError as error:
        raise DeadlineExceeded(f"the call brought no request within {REQUEST_TIMEOUT_S:g} s") from error


def _event_to_proto(event: PrefillEvent) -> worker_pb2.PrefillResponse:
    if isinstance(event, PromptLogprobs):
        return worker_pb2.PrefillResponse(prompt_logprobs=prompt_logprobs_to_proto(event))
    if isinstance(event, FirstToken):
        return worker_pb2.PrefillResponse(
            first_token=worker_pb2.FirstToken(
                chunk=token_chunk_to_proto(event.chunks[0]),
                other_chunks=[token_chunk_to_proto(chunk) for chunk in event.chunks[1:]],
                queue_us=round(event.queue_s * 1e6),
                prefill_us=round(event.prefill_s * 1e6),
                cached_prompt_tokens=event.cached_prompt_tokens,
            )
        )
    return worker_pb2.PrefillResponse(
        handed_over=worker_pb2.HandedOver(
            transport=event.transport,
            kv_bytes=event.kv_bytes,
            transfer_us=round(event.transfer_s * 1e6),
        )
    )
