"""The ledger of one worker: what this router has placed on it, and what of that the worker's reports cannot show yet.

A worker's load arrives up to an interval late. Placing by reports alone would send a burst of requests to one worker,
so each placement is counted here at once: in full while it lasts, and as "unreported" until the next report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from twinstage.types import WorkerLoad


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    tokens: int = 0
    blocks: int = 0

    def add(self, *, tokens: int, blocks: int, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * tokens
        self.blocks += sign * blocks


class Ledger:
    """Sums over the placements on one worker. Not thread-safe."""

    def __init__(self) -> None:
        self._live = _Sums()
        self._unreported = _Sums()
        self._reports = 0

    @contextlib.contextmanager
    def placed(self, *, tokens: int = 0, blocks: int = 0) -> Iterator[None]:
        """Count a placement for as long as the block lasts: prompt tokens to compute, or KV blocks to hold."""
        reports = self._reports
        self._live.add(tokens=tokens, blocks=blocks, sign=1)
        self._unreported.add(tokens=tokens, blocks=blocks, sign=1)
        try:
            yield
        finally:
            self._live.add(tokens=tokens, blocks=blocks, sign=-1)
            if reports == self._reports:
                self._unreported.add(tokens=tokens, blocks=blocks, sign=-1)

    def report_arrived(self) -> None:
        """From now on the worker's own numbers include what was placed before."""
        self._reports += 1
        self._unreported = _Sums()

    def sequences(self, load: WorkerLoad) -> int:
        """Sequences on the worker, at least those of this router."""
        return max(load.running + load.waiting + self._unreported.requests, self._live.requests)

    def waiting_tokens(self, load: WorkerLoad) -> int:
        """Prompt tokens still to be computed."""
        return max(load.waiting_tokens + self._unreported.tokens, self._live.tokens)

    def free_blocks(self, load: WorkerLoad, total_blocks: int) -> int:
        """KV blocks that nobody holds or is about to take."""
        return max(0, min(load.free_kv_blocks - self._unreported.blocks, total_blocks - self._live.blocks))
