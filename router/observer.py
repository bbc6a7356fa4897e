"""What the router makes of the outcome of each call: it is measured, and a refusal leaves a trace."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from router.trace import Traces
from twinstage.rpc.call_context import current_request_id

if TYPE_CHECKING:
    from router.metrics import Metrics


class RouterObserver:
    """A `CallObserver`."""

    def __init__(self, traces: Traces, metrics: Metrics | None, *, traced: Container[str]) -> None:
        """Without `metrics` nothing is measured. `traced` are the services whose calls are requests, which have traces.

        Other calls name requests that are not themselves: to look for one, or to abort it, displaces no trace.
        """
        self._traces = traces
        self._traced = traced
        self._metrics = metrics

    def handled(self, method: str, code: str, seconds: float) -> None:
        """As the protocol says."""
        if self._metrics is not None:
            self._metrics.handled(method, code, seconds)

    def failing(self, method: str, error: Exception) -> None:
        """As the protocol says. What failed after its admission has a trace, which says more."""
        if method.removeprefix("/").rpartition("/")[0] in self._traced:
            self._traces.refused(current_request_id(), error)
