"""WorkerService: what prefill workers and decode workers answer alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from twinstage.errors import FieldViolation, InvalidRequest, NotFound, Unavailable
from twinstage.hosting.load_board import LoadBoard
from twinstage.rpc.convert_description import worker_description_to_proto, worker_load_to_proto
from twinstage.telemetry.log import get_logger
from twinstage.types import WorkerDescription
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

logger = get_logger(__name__)

BUNDLE_PIECE_BYTES = 256 * 1024
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 50, 60_000


class ServedWorker(Protocol):
    """What a worker of either role shows to the process it runs in."""

    @property
    def description(self) -> WorkerDescription: ...

    @property
    def tokenizer_bundle(self) -> bytes: ...

    @property
    def loads(self) -> LoadBoard: ...

    def reset_prefix_cache(self) -> int:
        """Forget what is in the KV blocks; returns of how many. What is begun already is not cached later either."""

    def begin_drain(self, *, for_good: bool = False, fault: str = "") -> None:
        """Take nothing new from now on; with `for_good`, because the process ends; with `fault`, until a restart."""

    def end_drain(self) -> None:
        """Take new requests again. Raises Draining when the process ends, or a fault made it drain."""

    def check_books(self) -> None:
        """Raise IntegrityError unless the books of KV blocks balance. Called off the event loop."""

    async def wait_idle(self) -> None:
        """Return when nothing runs and nothing is being freed any more."""

    def end_streams(self) -> None:
        """Let the streams end that have no end of their own; what they hold is still delivered."""

    def abort_all(self) -> None:
        """End everything that runs; `wait_idle` says when all of it is freed."""

    def close(self) -> int:
        """Join threads and give memory back; returns how many KV blocks were leaked. Called off the event loop."""


Worker = TypeVar("Worker", bound=ServedWorker)


class Loading(Generic[Worker]):
    """A worker that may still be loading its model."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def set(self, worker: Worker) -> None:
        """The worker is ready."""
        self._worker = worker

    def get(self) -> Worker:
        """The worker. Raises Unavailable while it loads."""
        if self._worker is None:
            raise Unavailable("the worker is still loading its model", retry_after_s=1.0)
        return self._worker


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Describe, WatchLoad, GetTokenizerBundle, ResetPrefixCache, Drain and Undrain of one worker."""

    def __init__(self, loading: Loading[Any]) -> None:
        self._loading = loading

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:  # noqa: N802
        return worker_description_to_proto(self._worker().description)

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        if not MIN_INTERVAL_MS <= request.interval_ms <= MAX_INTERVAL_MS:
            allowed = f"must be from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
            raise InvalidRequest([FieldViolation("interval_ms", allowed)])
        async with aclosing(self._worker().loads.watch(request.interval_ms / 1000)) as loads:
            async for load in loads:
                yield worker_load_to_proto(load)

    async def GetTokenizerBundle(  # noqa: N802
        self, request: worker_pb2.GetTokenizerBundleRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GetTokenizerBundleResponse]:
        worker = self._worker()
        if request.fingerprint != worker.description.model.tokenizer_fingerprint:
            raise NotFound(
                "this worker has another tokenizer bundle; Describe names it",
                resource_type="tokenizer_bundle",
                resource_name=request.fingerprint,
            )
        bundle = memoryview(worker.tokenizer_bundle)
        for start in range(0, len(bundle), BUNDLE_PIECE_BYTES):
            yield worker_pb2.GetTokenizerBundleResponse(data=bytes(bundle[start : start + BUNDLE_PIECE_BYTES]))

    async def ResetPrefixCache(  # noqa: N802
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        dropped = self._worker().reset_prefix_cache()
        logger.info("prefix cache reset", dropped_blocks=dropped)
        return worker_pb2.ResetPrefixCacheResponse(dropped_blocks=dropped)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:  # noqa: N802
        self._worker().begin_drain()
        logger.info("drains until it is told otherwise")
        return worker_pb2.DrainResponse()

    async def Undrain(self, request: worker_pb2.UndrainRequest, context: Any) -> worker_pb2.UndrainResponse:  # noqa: N802
        self._worker().end_drain()
        logger.info("takes requests again")
        return worker_pb2.UndrainResponse()

    def _worker(self) -> ServedWorker:
        worker: ServedWorker = self._loading.get()
        return worker
