"""The ledger of one worker: what this router has placed on it, and what of that the worker's reports cannot show yet.

A worker's load arrives up to an interval late. Placing by reports alone would send a burst of requests to one worker,
so each placement is counted here at once: in full while it lasts, and as "unreported" until the next report. Of KV
blocks, a placement counts those of the whole prompt until its grant says how many the worker set aside for it alone:
blocks that requests share are held once, however many share them, and they are in the worker's reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from twinstage.types import WorkerLoad


@dataclass(slots=True)
class _Sums:
    sequences: int = 0
    tokens: int = 0
    blocks: int = 0

    def add(self, placement: Placement, *, sign: int) -> None:
        self.sequences += sign * placement.sequences
        self.tokens += sign * placement.tokens
        self.blocks += sign * placement.blocks


class Placement:
    """One placement in a ledger, while it lasts."""

    __slots__ = ("_ledger", "blocks", "reports", "sequences", "tokens")

    def __init__(self, ledger: Ledger, *, sequences: int, tokens: int, blocks: int, reports: int) -> None:
        self._ledger = ledger
        self.sequences = sequences
        self.tokens = tokens
        self.blocks = blocks
        self.reports = reports  # that had arrived before

    def granted(self, blocks: int) -> None:
        """The worker set `blocks` aside for this placement alone."""
        self._ledger._count(self, sign=-1)
        self.blocks = blocks
        self._ledger._count(self, sign=1)


class Ledger:
    """Sums over the placements on one worker. Not thread-safe."""

    def __init__(self) -> None:
        self._live = _Sums()
        self._unreported = _Sums()
        self._reports = 0

    @contextlib.contextmanager
    def placed(self, *, sequences: int = 1, tokens: int = 0, blocks: int = 0) -> Iterator[Placement]:
        """Count a placement for as long as the block lasts: prompt tokens to compute, or KV blocks to hold."""
        placement = Placement(self, sequences=sequences, tokens=tokens, blocks=blocks, reports=self._reports)
        self._count(placement, sign=1)
        try:
            yield placement
        finally:
            self._count(placement, sign=-1)

    def _count(self, placement: Placement, *, sign: int) -> None:
        self._live.add(placement, sign=sign)
        if placement.reports == self._reports:
            self._unreported.add(placement, sign=sign)

    def report_arrived(self) -> None:
        """From now on the worker's own numbers include what was placed before."""
        self._reports += 1
        self._unreported = _Sums()

    def sequences(self, load: WorkerLoad) -> int:
        """Sequences on the worker, at least those of this router."""
        return max(load.running + load.waiting + self._unreported.sequences, self._live.sequences)

    def waiting_tokens(self, load: WorkerLoad) -> int:
        """Prompt tokens still to be computed."""
        return max(load.waiting_tokens + self._unreported.tokens, self._live.tokens)

    def free_blocks(self, load: WorkerLoad, total_blocks: int) -> int:
        """KV blocks that nobody holds or is about to take."""
        return max(0, min(load.free_kv_blocks - self._unreported.blocks, total_blocks - self._live.blocks))
