"""One request on a decode worker, what its router is told when it is over, and the books of all requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from decode_worker.sessions import SequenceTotals, Session
from twinstage.engine.sequence import SequenceStats
from twinstage.errors import DeadlineExceeded, TwinstageError
from twinstage.kv.block_pool import BlockTable
from twinstage.lifecycle import DecodePhase, Lifecycle, decode_lifecycle
from twinstage.types import KvGrant, RequestId, SequenceSpec

DEADLINE_MARGIN_S = 0.1  # by which the deadline may be over earlier on another process


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """One request on this worker. `key` is its name in the engine, unique even when a router retries."""

    key: RequestId
    spec: SequenceSpec
    session: Session
    table: BlockTable
    grant: KvGrant
    lease: asyncio.TimerHandle
    deadline_s: float  # monotonic; the request's own
    lifecycle: Lifecycle[DecodePhase] = field(default_factory=decode_lifecycle)
    kv_bytes_received: int = 0


def totals_of(request: DecodeRequest, stats: SequenceStats) -> SequenceTotals:
    """What the router is told of a finished request."""
    return SequenceTotals(
        request_id=request.spec.request_id,
        queue_s=stats.queue_s,
        decode_s=stats.decode_s,
        kv_bytes_received=request.kv_bytes_received,
        computed_prompt_tokens=stats.computed_prompt_tokens,
    )


def blamed(request: DecodeRequest, error: TwinstageError) -> TwinstageError:
    """What ended a hand-over: its error, unless the request's deadline is over; then router and sender give up, too."""
    if time.monotonic() < request.deadline_s - DEADLINE_MARGIN_S:
        return error
    return DeadlineExceeded(f"the request's deadline came before its KV blocks: {error}")


class RequestBook:
    """The requests of a worker while they live, and those that ended while somebody may still touch their blocks."""

    def __init__(self) -> None:
        self._live: dict[RequestId, DecodeRequest] = {}
        self._expected: dict[int, DecodeRequest] = {}  # by transfer, until it is committed
        self._freeing: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._live) + len(self._freeing)

    def knows(self, owner: str) -> bool:
        """Whether blocks may be held in this name."""
        return owner in self._live or owner in self._freeing

    def enter(self, request: DecodeRequest) -> None:
        """A request whose blocks were granted."""
        self._live[request.key] = request
        self._expected[request.grant.transfer_id] = request

    def get(self, key: RequestId) -> DecodeRequest | None:
        """The live request that the engine knows by `key`."""
        return self._live.get(key)

    def live(self, session: Session | None = None) -> list[DecodeRequest]:
        """All live requests, or those of one session."""
        return [request for request in self._live.values() if session in (None, request.session)]

    def expected(self, transfer_id: int) -> DecodeRequest | None:
        """The live request that waits for this transfer."""
        return self._expected.get(transfer_id)

    def committed(self, transfer_id: int) -> DecodeRequest | None:
        """The transfer is complete; returns its request if that lives."""
        return self._expected.pop(transfer_id, None)

    def end(self, request: DecodeRequest) -> None:
        """The request lives no more."""
        del self._live[request.key]
        self._expected.pop(request.grant.transfer_id, None)

    def hold(self, key: RequestId) -> None:
        """Somebody may still touch the blocks of a request that ends, until `freed`."""
        self._freeing.add(key)

    def freed(self, key: RequestId) -> None:
        self._freeing.discard(key)
