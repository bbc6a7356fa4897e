"""What happened when: slices of equal length, which are joined in pairs when a run grows long."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstage.bench.histogram import DurationHistogram
from twinstage.bench.results import TimelineBin

FIRST_BIN_S = 0.25
MAX_BINS = 240


@dataclass(slots=True)
class Slice:
    """One slice while it is counted. `in_flight` is the most requests that were in progress at once."""

    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    in_flight: int = 0
    gaps: DurationHistogram = field(default_factory=lambda: DurationHistogram(coarse=True))

    def merge(self, later: Slice) -> None:
        self.output_tokens += later.output_tokens
        self.finished += later.finished
        self.failed += later.failed
        self.in_flight = max(self.in_flight, later.in_flight)
        self.gaps.merge(later.gaps)


class Timeline:
    """Slices from `start_s` on, at most `MAX_BINS` of them."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._slices: list[Slice] = []
        self._in_flight = 0
        self.bin_s = FIRST_BIN_S

    def set_in_flight(self, number: int, now_s: float) -> None:
        """From now on so many requests are in progress."""
        entry = self.at(now_s)
        entry.in_flight = max(entry.in_flight, number)
        self._in_flight = number

    def at(self, now_s: float) -> Slice:
        """The slice of a moment; what came before the start counts to the first."""
        index = max(0, int((now_s - self._start_s) / self.bin_s))
        while index >= MAX_BINS:
            self._join_pairs()
            index //= 2
        while index >= len(self._slices):
            self._slices.append(Slice(in_flight=self._in_flight))
        return self._slices[index]

    def bins(self) -> tuple[TimelineBin, ...]:
        return tuple(
            TimelineBin(
                start_s=index * self.bin_s,
                output_tokens=entry.output_tokens,
                finished=entry.finished,
                failed=entry.failed,
                in_flight=entry.in_flight,
                gap_p50_s=entry.gaps.percentile(50),
                gap_p99_s=entry.gaps.percentile(99),
            )
            for index, entry in enumerate(self._slices)
        )

    def _join_pairs(self) -> None:
        for first, second in zip(self._slices[::2], self._slices[1::2], strict=False):
            first.merge(second)
        self._slices = self._slices[::2]
        self.bin_s *= 2
