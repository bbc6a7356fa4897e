"""What the router makes of the outcome of each call: it is measured, and a refusal leaves a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.trace import Traces
from twinstage.rpc.call_context import current_request_id

if TYPE_CHECKING:
    from router.metrics import Metrics


class RouterObserver:
    """A `CallObserver`."""

    def __init__(self, traces: Traces, metrics: Metrics | None) -> None:
        """Without `metrics` nothing is measured."""
        self._traces = traces
        self._metrics = metrics

    def handled(self, method: str, code: str, seconds: float) -> None:
        """As the protocol says."""
        if self._metrics is not None:
            self._metrics.handled(method, code, seconds)

    def failing(self, error: Exception) -> None:
        """As the protocol says. What failed after its admission has a trace, which says more."""
        self._traces.refused(current_request_id(), error)
