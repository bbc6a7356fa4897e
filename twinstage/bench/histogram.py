"""Durations counted in logarithmic buckets: percentiles of any number of them in little memory."""

from __future__ import annotations

import math

from twinstage.bench.results import Bar, Distribution

_SMALLEST_S = 1e-6  # what is shorter counts as this
_FINE = math.log(1.001)  # a bucket's width; its middle is within 0.05 % of all that it holds
_COARSE = math.log(1.05)


class DurationHistogram:
    """A histogram over a logarithmic scale. Extremes and mean are exact, percentiles within half a bucket."""

    __slots__ = ("_buckets", "_max_s", "_min_s", "_width", "count", "total_s")

    def __init__(self, *, coarse: bool = False) -> None:
        self._width = _COARSE if coarse else _FINE
        self._buckets: dict[int, int] = {}
        self._min_s = math.inf
        self._max_s = 0.0
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        bucket = int(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S) / self._width)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.total_s += seconds
        if seconds < self._min_s:
            self._min_s = seconds
        if seconds > self._max_s:
            self._max_s = seconds

    def merge(self, other: DurationHistogram) -> None:
        """Take in what another histogram of the same kind has counted."""
        assert self._width == other._width
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total_s += other.total_s
        self._min_s = min(self._min_s, other._min_s)
        self._max_s = max(self._max_s, other._max_s)

    def percentile(self, percent: float) -> float | None:
        """The smallest duration that at least `percent` of all do not exceed; None when there are none."""
        percentiles = self._percentiles((percent,))
        return percentiles[0] if percentiles else None

    def distribution(self) -> Distribution | None:
        if not self.count:
            return None
        p50_s, p90_s, p95_s, p99_s = self._percentiles((50, 90, 95, 99))
        return Distribution(
            count=self.count,
            mean_s=self.total_s / self.count,
            min_s=self._min_s,
            p50_s=p50_s,
            p90_s=p90_s,
            p95_s=p95_s,
            p99_s=p99_s,
            max_s=self._max_s,
        )

    def bars(self, number: int) -> tuple[Bar, ...]:
        """At most `number` bars of equal width on the linear scale, the last of which holds all above the 99th
        percentile, so that one straggler does not squeeze the others.
        """
        if not self.count:
            return ()
        low_s, high_s = self._min_s, self.percentile(99) or self._max_s
        step_s = (high_s - low_s) / (number - 1)
        if step_s <= 0:
            return (Bar(upper_s=self._max_s, count=self.count),)
        counts = [0] * number
        for bucket, count in self._buckets.items():
            index = math.ceil((self._middle_s(bucket) - low_s) / step_s) - 1
            counts[min(max(index, 0), number - 1)] += count
        uppers_s = [min(low_s + step_s * index, self._max_s) for index in range(1, number)] + [self._max_s]
        return tuple(Bar(upper_s=upper_s, count=count) for upper_s, count in zip(uppers_s, counts, strict=True))

    def _percentiles(self, percents: tuple[float, ...]) -> list[float]:
        """In one walk; `percents` ascend. Empty when nothing was counted."""
        found: list[float] = []
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            while len(found) < len(percents) and seen >= math.ceil(percents[len(found)] / 100 * self.count):
                found.append(self._middle_s(bucket))
        return found

    def _middle_s(self, bucket: int) -> float:
        middle_s = _SMALLEST_S * math.exp((bucket + 0.5) * self._width)
        return min(max(middle_s, self._min_s), self._max_s)
