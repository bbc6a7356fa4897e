"""How the end of a request on a worker is logged."""

from __future__ import annotations

import enum

from twinstage.errors import DeadlineExceeded
from twinstage.lifecycle import Failed, Finished, Outcome
from twinstage.telemetry.log import get_logger
from twinstage.telemetry.trace_context import trace_id_of
from twinstage.types import Role, SequenceSpec

logger = get_logger(__name__)


def log_end(role: Role, spec: SequenceSpec, *, phase: enum.Enum, outcome: Outcome) -> None:
    """Log an end that is not a finish; `phase` is where the request was."""
    bound = {"request_id": spec.request_id, "trace_id": trace_id_of(spec.traceparent), "phase": phase.value}
    if isinstance(outcome, Failed):
        error = outcome.error
        # A deadline is the client's business, and no fault of the service.
        log = logger.info if isinstance(error, DeadlineExceeded) else logger.warning
        log(f"{role.value} failed", reason=error.reason, error=str(error), **bound)
    elif not isinstance(outcome, Finished):
        logger.info(f"{role.value} cancelled", **bound)
