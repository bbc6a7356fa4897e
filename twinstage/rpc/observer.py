"""Who wants to know what becomes of each call of a server."""

from __future__ import annotations

from typing import Protocol


class CallObserver(Protocol):
    """Who wants to know of every call."""

    def handled(self, method: str, code: str, seconds: float) -> None:
        """A call of "/package.Service/Method" has ended, with a gRPC code by name."""

    def failing(self, method: str, error: Exception) -> None:
        """The client of the call that the present task serves is about to be told of `error`."""
