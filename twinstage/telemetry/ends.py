"""How the end of a request on a worker is logged."""

from __future__ import annotations

import enum

from twinstage.errors import DeadlineExceeded
from twinstage.lifecycle import Failed, Finished, Outcome
from twinstage.telemetry.log import get_logger
from twinstage.types import RequestId, Role

logger = get_logger(__name__)


def log_end(role: Role, request_id: RequestId, *, phase: enum.Enum, outcome: Outcome) -> None:
    """Log an end that is not a finish; `phase` is where the request was."""
    if isinstance(outcome, Failed):
        error = outcome.error
        # A deadline is the client's business, and no fault of the service.
        log = logger.info if isinstance(error, DeadlineExceeded) else logger.warning
        log(f"{role.value} failed", request_id=request_id, phase=phase.value, reason=error.reason, error=str(error))
    elif not isinstance(outcome, Finished):
        logger.info(f"{role.value} cancelled", request_id=request_id, phase=phase.value)
