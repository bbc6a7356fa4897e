"""One request on a prefill worker, and what is said about it when it is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prefill_worker.events import PrefillEvent
from prefill_worker.handoff import Handoff
from twinstage.errors import TwinstageError
from twinstage.lifecycle import Failed, Lifecycle, Outcome, PrefillPhase, prefill_lifecycle
from twinstage.telemetry.log import get_logger
from twinstage.types import RequestId, SequenceSpec

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """One request on its way through the worker. `key` is its name in the engine, unique even when a client retries."""

    key: RequestId
    spec: SequenceSpec
    handoff: Handoff | None = None
    lifecycle: Lifecycle[PrefillPhase] = field(default_factory=prefill_lifecycle)
    events: asyncio.Queue[PrefillEvent | None] = field(default_factory=asyncio.Queue)  # at most two, then None
    transfer_open: bool = False
    in_engine: bool = False


def log_end(request: PrefillRequest, phase: PrefillPhase, outcome: Outcome) -> None:
    """Log an end that is not a finish; `phase` is where the request was."""
    if isinstance(outcome, Failed):
        error: TwinstageError = outcome.error
        logger.warning(
            "prefill failed",
            request_id=request.spec.request_id,
            phase=phase.value,
            reason=error.reason,
            error=str(error),
        )
    else:
        logger.info("prefill cancelled", request_id=request.spec.request_id, phase=phase.value)
