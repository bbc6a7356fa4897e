"""AdminService: the router and its workers, for operators."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import twinstage
from router.cache_reset import reset_prefix_caches
from router.drain import drain_worker, undrain_worker
from router.gate import Gate
from router.live import LiveRequests
from router.service.admin_messages import load_to_proto, trace_to_proto
from router.service.door import check_model_name
from router.violations import Violations
from router.worker_entry import WorkerEntry
from router.workers import WorkerTable
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.rpc.convert_public import seconds_from_proto, seconds_to_proto, worker_to_proto
from twinstage.types import WorkerId
from twinstage.v1 import admin_pb2, admin_pb2_grpc

DEFAULT_INTERVAL_S, MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 0.1, 3600.0  # of WatchLoad


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """What operators look at, and what they change."""

    def __init__(
        self,
        workers: WorkerTable,
        live: LiveRequests,
        *,
        generation_gate: Gate,
        embedding_gate: Gate,
        draining: asyncio.Event,
    ) -> None:
        """At `draining`, streams of loads end."""
        self._workers = workers
        self._live = live
        self._generation_gate = generation_gate
        self._embedding_gate = embedding_gate
        self._draining = draining
        self._started_s = time.monotonic()

    async def GetServerInfo(  # noqa: N802 - the names of methods are the proto's
        self, request: admin_pb2.GetServerInfoRequest, context: Any
    ) -> admin_pb2.GetServerInfoResponse:
        return admin_pb2.GetServerInfoResponse(
            version=twinstage.__version__,
            uptime=seconds_to_proto(time.monotonic() - self._started_s),
            live_requests=len(self._live),
            max_live_requests=self._generation_gate.max_live,
        )

    async def ListWorkers(  # noqa: N802
        self, request: admin_pb2.ListWorkersRequest, context: Any
    ) -> admin_pb2.ListWorkersResponse:
        workers = [_entry_to_proto(entry) for entry in self._workers.entries]
        return admin_pb2.ListWorkersResponse(workers=sorted(workers, key=lambda worker: (worker.id, worker.address)))

    async def GetLoad(  # noqa: N802
        self, request: admin_pb2.GetLoadRequest, context: Any
    ) -> admin_pb2.GetLoadResponse:
        return admin_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(  # noqa: N802
        self, request: admin_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[admin_pb2.WatchLoadResponse]:
        interval_s = _interval_s(request)
        while not self._draining.is_set():
            yield admin_pb2.WatchLoadResponse(load=self._load())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), interval_s)

    async def GetTrace(  # noqa: N802
        self, request: admin_pb2.GetTraceRequest, context: Any
    ) -> admin_pb2.GetTraceResponse:
        trace = self._live.traces.find(_required("request_id", request.request_id))
        return admin_pb2.GetTraceResponse(trace=trace_to_proto(trace))

    def _load(self) -> admin_pb2.Load:
        return load_to_proto(
            self._workers.models, generation_gate=self._generation_gate, embedding_gate=self._embedding_gate
        )

    async def AbortRequest(  # noqa: N802
        self, request: admin_pb2.AbortRequestRequest, context: Any
    ) -> admin_pb2.AbortRequestResponse:
        self._live.abort(_required("request_id", request.request_id))
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
            self._workers,
            WorkerId(_required("worker_id", request.worker_id)),
            wait=request.wait,
            timeout_s=context.time_remaining(),
        )
        return admin_pb2.DrainWorkerResponse(worker=_entry_to_proto(entry))

    async def UndrainWorker(  # noqa: N802
        self, request: admin_pb2.UndrainWorkerRequest, context: Any
    ) -> admin_pb2.UndrainWorkerResponse:
        worker_id = WorkerId(_required("worker_id", request.worker_id))
        entry = await undrain_worker(self._workers, worker_id, timeout_s=context.time_remaining())
        return admin_pb2.UndrainWorkerResponse(worker=_entry_to_proto(entry))


def _required(field: str, value: str) -> str:
    if not value:
        raise InvalidRequest([FieldViolation(field, "must not be empty")])
    return value


def _interval_s(request: admin_pb2.WatchLoadRequest) -> float:
    """Seconds between two loads. Raises InvalidRequest."""
    if not request.HasField("interval"):
        return DEFAULT_INTERVAL_S
    interval_s = seconds_from_proto(request.interval)
    violations = Violations()
    violations.check_number("interval", interval_s, low=MIN_INTERVAL_S, high=MAX_INTERVAL_S)
    violations.raise_any()
    return interval_s


def _entry_to_proto(entry: WorkerEntry) -> admin_pb2.Worker:
    return worker_to_proto(
        entry.description, entry.load, address=entry.address, state=entry.state.value, detail=entry.shown_detail
    )
