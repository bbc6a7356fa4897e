"""How long requests take, learned from those that have ended.

Requests are alike when they have the same kind: any hashable value, such as model and size, that the caller chooses.
For each kind there is a curve, seconds of service by how many requests were served at once:

    seconds │            ┌─────   beyond the busiest time known: no guess, it is learned when it happens
            │          ╱
            │     ╱‾‾        points: moving averages, one for each power of two; straight lines between
            │  ╱
            └───────────────── requests at once, from (0, 0): fewer of them share the machine

With nothing learned the answer is 0, so that nobody is refused on a guess. Until then `Underway` tells how long those
take at least that are being served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

SMOOTHING = 0.2  # weight of the newest request in the moving averages


@dataclass(slots=True)
class _Point:
    concurrency: float
    service_s: float

    def add(self, concurrency: float, service_s: float) -> None:
        self.concurrency += SMOOTHING * (concurrency - self.concurrency)
        self.service_s += SMOOTHING * (service_s - self.service_s)


class Underway:
    """Requests that are being served, of kinds of which nothing was known when they began.

    They take at least as long as they have taken; times are readings of one clock.
    """

    def __init__(self) -> None:
        self._num: Counter[Hashable] = Counter()
        self._started_s: dict[Hashable, float] = {}  # the sum of their beginnings

    def began(self, kind: Hashable, now_s: float) -> None:
        self._num[kind] += 1
        self._started_s[kind] = self._started_s.get(kind, 0.0) + now_s

    def ended(self, kind: Hashable, started_s: float) -> None:
        """A request that `began` then."""
        self._num[kind] -= 1
        self._started_s[kind] -= started_s
        if not self._num[kind]:
            del self._num[kind], self._started_s[kind]

    def age_s(self, kind: Hashable, now_s: float) -> float:
        """Average of this kind; 0 when there is none."""
        num = self._num.get(kind, 0)
        return max(0.0, now_s - self._started_s[kind] / num) if num else 0.0

    def mean_age_s(self, now_s: float) -> float:
        """Average of all."""
        num = self._num.total()
        return max(0.0, now_s - sum(self._started_s.values()) / num) if num else 0.0


class ServiceTimes:
    """The curves of all kinds, and the average over all requests."""

    def __init__(self) -> None:
        self._curves: dict[Hashable, dict[int, _Point]] = {}  # points by the power of two
        self._overall: _Point | None = None

    @property
    def mean_s(self) -> float:
        """Average over all requests; 0 while nothing has been learned."""
        return self._overall.service_s if self._overall is not None else 0.0

    def knows(self, kind: Hashable) -> bool:
        """Whether anything was learned of this kind."""
        return kind in self._curves

    def expected_s(self, kind: Hashable, *, concurrency: float) -> float:
        """How long a request of this kind takes as one of `concurrency`."""
        below = _Point(0.0, 0.0)
        for point in sorted(self._curves.get(kind, {}).values(), key=lambda point: point.concurrency):
            service_s = point.service_s
            if below.concurrency > 0:  # more requests take their share and no more: what says otherwise is outdated
                service_s = min(service_s, below.service_s * point.concurrency / below.concurrency)
            if concurrency <= point.concurrency:
                share = (concurrency - below.concurrency) / (point.concurrency - below.concurrency)
                return below.service_s + share * (service_s - below.service_s)
            below = _Point(point.concurrency, service_s)
        return below.service_s

    def learn(self, kind: Hashable, service_s: float, *, concurrency: float) -> None:
        """A request was served in `service_s`, on average as one of `concurrency`."""
        curve = self._curves.setdefault(kind, {})
        power = int(concurrency).bit_length()
        if power in curve:
            curve[power].add(concurrency, service_s)
        else:
            curve[power] = _Point(concurrency, service_s)
        if self._overall is None:
            self._overall = _Point(concurrency, service_s)
        else:
            self._overall.add(concurrency, service_s)
