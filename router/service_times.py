"""How long requests take, learned from those that have ended.

Requests are alike when they have the same kind: any hashable value, such as model and size, that the caller chooses.
For each kind there is a curve, seconds of service by how many requests were served at once:

    seconds │            ┌─────   beyond the busiest time known: no guess, it is learned when it happens
            │          ╱
            │     ╱‾‾        points: moving averages, one for each power of two; straight lines between
            │  ╱
            └───────────────── requests at once, from (0, 0): fewer of them share the machine

With nothing learned the answer is 0, so that nobody is refused on a guess.
"""

from __future__ import annotations

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


class ServiceTimes:
    """The curves of all kinds, and the average over all requests."""

    def __init__(self) -> None:
        self._curves: dict[Hashable, dict[int, _Point]] = {}  # points by the power of two
        self._overall: _Point | None = None

    @property
    def mean_s(self) -> float:
        """Average over all requests; 0 while nothing has been learned."""
        return self._overall.service_s if self._overall is not None else 0.0

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
