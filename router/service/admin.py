"""AdminService: the router and its workers, for operators."""

from __future__ import annotations

import time
from typing import Any

import twinstage
from router.cache_reset import reset_prefix_caches
from router.drain import drain_worker, undrain_worker
from router.gate import Gate
from router.live import LiveRequests
from router.service.door import check_model_name
from router.worker_entry import WorkerEntry
from router.workers import WorkerTable
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.rpc.convert_public import seconds_to_proto, worker_to_proto
from twinstage.types import WorkerId
from twinstage.v1 import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """GetServerInfo, ListWorkers, AbortRequest, ResetPrefixCache, DrainWorker and UndrainWorker."""

    def __init__(self, workers: WorkerTable, live: LiveRequests, *, gate: Gate) -> None:
        """`gate` is that of the generation requests, whose limit GetServerInfo tells."""
        self._workers = workers
        self._live = live
        self._gate = gate
        self._started_s = time.monotonic()

    async def GetServerInfo(  # noqa: N802 - the names of methods are the proto's
        self, request: admin_pb2.GetServerInfoRequest, context: Any
    ) -> admin_pb2.GetServerInfoResponse:
        return admin_pb2.GetServerInfoResponse(
            version=twinstage.__version__,
            uptime=seconds_to_proto(time.monotonic() - self._started_s),
            live_requests=len(self._live),
            max_live_requests=self._gate.max_live,
        )

    async def ListWorkers(  # noqa: N802
        self, request: admin_pb2.ListWorkersRequest, context: Any
    ) -> admin_pb2.ListWorkersResponse:
        workers = [_entry_to_proto(entry) for entry in self._workers.entries]
        return admin_pb2.ListWorkersResponse(workers=sorted(workers, key=lambda worker: (worker.id, worker.address)))

    async def AbortRequest(  # noqa: N802
        self, request: admin_pb2.AbortRequestRequest, context: Any
    ) -> admin_pb2.AbortRequestResponse:
        if not request.request_id:
            raise InvalidRequest([FieldViolation("request_id", "must not be empty")])
        self._live.abort(request.request_id)
        return admin_pb2.AbortRequestResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Any
    ) -> admin_pb2.ResetPrefixCacheResponse:
        check_model_name(request.model)
        told = await reset_prefix_caches(self._workers, model=request.model, worker_id=request.worker_id)
        return admin_pb2.ResetPrefixCacheResponse(
            workers=[
                admin_pb2.PrefixCacheReset(worker_id=worker_id, dropped_blocks=dropped) for worker_id, dropped in told
            ]
        )

    async def DrainWorker(  # noqa: N802
        self, request: admin_pb2.DrainWorkerRequest, context: Any
    ) -> admin_pb2.DrainWorkerResponse:
        entry = await drain_worker(
            self._workers, _worker_id(request.worker_id), wait=request.wait, timeout_s=context.time_remaining()
        )
        return admin_pb2.DrainWorkerResponse(worker=_entry_to_proto(entry))

    async def UndrainWorker(  # noqa: N802
        self, request: admin_pb2.UndrainWorkerRequest, context: Any
    ) -> admin_pb2.UndrainWorkerResponse:
        entry = await undrain_worker(self._workers, _worker_id(request.worker_id), timeout_s=context.time_remaining())
        return admin_pb2.UndrainWorkerResponse(worker=_entry_to_proto(entry))


def _worker_id(value: str) -> WorkerId:
    if not value:
        raise InvalidRequest([FieldViolation("worker_id", "must not be empty")])
    return WorkerId(value)


def _entry_to_proto(entry: WorkerEntry) -> admin_pb2.Worker:
    return worker_to_proto(
        entry.description, entry.load, address=entry.address, state=entry.state.value, detail=entry.shown_detail
    )
