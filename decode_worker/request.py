"""One request on a decode worker, and what is said about it when it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from decode_worker.sessions import SequenceTotals, Session
from twinstage.engine.sequence import SequenceStats
from twinstage.errors import TwinstageError
from twinstage.kv.block_pool import BlockTable
from twinstage.lifecycle import DecodePhase, Failed, Lifecycle, Outcome, decode_lifecycle
from twinstage.telemetry.log import get_logger
from twinstage.types import KvGrant, RequestId, SequenceSpec

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """One request on this worker. `key` is its name in the engine, unique even when a router retries."""

    key: RequestId
    spec: SequenceSpec
    session: Session
    table: BlockTable
    grant: KvGrant
    lease: asyncio.TimerHandle
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


def log_end(request: DecodeRequest, phase: DecodePhase, outcome: Outcome) -> None:
    """Log an end that is not a finish; `phase` is where the request was."""
    if isinstance(outcome, Failed):
        error: TwinstageError = outcome.error
        logger.warning(
            "decode failed",
            request_id=request.spec.request_id,
            phase=phase.value,
            reason=error.reason,
            error=str(error),
        )
    else:
        logger.info("decode ended by the router", request_id=request.spec.request_id, phase=phase.value)
