"""What is said of repeated measurements: the median, and how far the values spread."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, lowest and highest of `count` values."""

    median: float
    lowest: float
    highest: float
    count: int


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError when there is no value or one is not finite."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"cannot summarize {list(values)}")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """`ours / theirs`, round by round, so that what disturbs a round disturbs both. Raises ValueError when uneven."""
    return [own / other for own, other in zip(ours, theirs, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the values do not exceed, interpolated. Raises ValueError without any."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def gaps(times: Sequence[float]) -> list[float]:
    """The differences of consecutive values."""
    return [later - earlier for earlier, later in itertools.pairwise(times)]
