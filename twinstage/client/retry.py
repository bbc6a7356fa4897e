"""Calls are made again when the router's status says when (`grpc-retry-pushback-ms`, the same as RetryInfo).

It says so of requests that it refused, and of those that failed before anything of their answer was sent; nothing else
is tried again: without its word, nobody knows whether a request is being served.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import grpc

from twinstage.rpc.status import PUSHBACK_METADATA_KEY

DEFAULT_RETRIES = 2


class Attempts:
    """The attempts of one call: how long each may take, and how long to wait between them."""

    def __init__(self, retries: int, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`retries` after the first attempt; `timeout_s` is for all of them, waits included."""
        self._retries = retries
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None or timeout_s == math.inf else clock() + timeout_s

    @property
    def timeout_s(self) -> float | None:
        """Time left for the next attempt."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before the next attempt, which is counted; None when `error` is the last word."""
        pause_s = _pushback_s(error)
        if pause_s is None or self._retries <= 0:
            return None
        if self._deadline_s is not None and self._clock() + pause_s >= self._deadline_s:
            return None  # there would be no time left
        self._retries -= 1
        return pause_s


def _pushback_s(error: grpc.RpcError) -> float | None:
    call = cast(Any, error)  # errors of both kinds of channels have these methods
    metadata = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())
    values = [value for key, value in metadata if key == PUSHBACK_METADATA_KEY]
    # A negative number means: do not come back.
    return int(values[0]) / 1000 if len(values) == 1 and str(values[0]).isdecimal() else None
