"""Who waits at the gate, and whose turn it is.

    priority   the highest goes first, but one that is passed over rises by a level every SECONDS_PER_PRIORITY_LEVEL,
               until one of its requests has had its turn: lower priorities are slowed down, not starved, as long as
               priorities are less far apart than requests may wait (`--max-priority`)
    caller     of one priority, the caller that holds the fewest permits for its weight goes next, so that those who
               always have something waiting hold permits in proportion to their weights, however much each of them
               queues and however long its requests take; of equals, the one whose last turn is longest ago
    order      of one caller, first come, first served
    size       a call takes as many permits, and counts as many in the queue, as it has continuations that are computed
               at once

A queue that is full makes room for a newcomer at the cost of who uses most of it: the caller that has most waiting for
its weight, whatever the priorities of its requests, loses the newest one of its own lowest priority. So nobody keeps
others out of the queue by calling all of its requests urgent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twinstage.types import SECONDS_PER_PRIORITY_LEVEL

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Waiter(Generic[Item]):
    """A place in the queue."""

    caller: str
    priority: int
    item: Item
    size: int = 1  # permits that it takes
    number: int = 0  # of its arrival


@dataclass(slots=True)
class _Level(Generic[Item]):
    """Those of one priority: by caller, in order."""

    since_s: float  # it began to wait, or had its last turn
    waiting: dict[str, dict[int, Waiter[Item]]] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)  # of all that a caller has waiting


class FairQueue(Generic[Item]):
    """The waiters, and the permits that callers hold. Each call costs as much as there are callers and priorities."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: the share of a caller beside others; 1 for those that are not named."""
        self._weights = weights or {}
        self._levels: dict[int, _Level[Item]] = {}
        self._held: Counter[str] = Counter()
        self._last_turns: dict[str, int] = {}  # of those that wait or hold something
        self._numbers = itertools.count(1)
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Waiter[Item]]:
        for level in self._levels.values():
            for places in level.waiting.values():
                yield from places.values()

    def add(self, waiter: Waiter[Item], *, now_s: float) -> None:
        waiter.number = next(self._numbers)
        level = self._levels.get(waiter.priority)
        if level is None:
            level = self._levels[waiter.priority] = _Level(since_s=now_s)
        level.waiting.setdefault(waiter.caller, {})[waiter.number] = waiter
        level.sizes[waiter.caller] += waiter.size
        self._num_waiting += 1

    def remove(self, waiter: Waiter[Item]) -> bool:
        """Whether it still waited."""
        level = self._levels.get(waiter.priority)
        places = level.waiting.get(waiter.caller) if level is not None else None
        if level is None or places is None or places.pop(waiter.number, None) is None:
            return False
        self._num_waiting -= 1
        level.sizes[waiter.caller] -= waiter.size
        if not places:
            del level.waiting[waiter.caller], level.sizes[waiter.caller]
        if not level.waiting:
            del self._levels[waiter.priority]
        self._forget(waiter.caller)
        return True

    def pop(self, *, now_s: float) -> Waiter[Item] | None:
        """Take out the one whose turn it is; None when nobody waits."""
        if not self._levels:
            return None
        priority = max(self._levels, key=lambda priority: self._rank(priority, now_s))
        level = self._levels[priority]
        level.since_s = now_s
        caller = min(level.waiting, key=self._share)
        waiter = next(iter(level.waiting[caller].values()))
        self.remove(waiter)
        return waiter

    def _rank(self, priority: int, now_s: float) -> tuple[float, int]:
        return (priority + (now_s - self._levels[priority].since_s) / SECONDS_PER_PRIORITY_LEVEL, priority)

    def _share(self, caller: str) -> tuple[float, int]:
        return (self._held[caller] / self._weight(caller), self._last_turns.get(caller, 0))

    def _weight(self, caller: str) -> float:
        return self._weights.get(caller, 1.0)

    def push_out(self, newcomer: Waiter[Item]) -> Waiter[Item]:
        """Who leaves a full queue when `newcomer` comes: one that waits, which is taken out, or the newcomer."""
        counts = Counter({newcomer.caller: newcomer.size})
        for level in self._levels.values():
            counts.update(level.sizes)
        shares = {caller: count / self._weight(caller) for caller, count in counts.items()}
        heaviest = max(shares.values())
        if shares[newcomer.caller] < heaviest:
            victim = self._last_of(next(caller for caller, share in shares.items() if share == heaviest))
        else:  # it takes from itself
            victim = self._last_of(newcomer.caller) if counts[newcomer.caller] > newcomer.size else newcomer
            if victim.priority >= newcomer.priority:
                return newcomer
        self.remove(victim)
        return victim

    def _last_of(self, caller: str) -> Waiter[Item]:
        """The newest request of the lowest priority of a caller that waits."""
        places = self._levels[min(p for p, level in self._levels.items() if caller in level.waiting)].waiting[caller]
        return places[next(reversed(places))]

    def num_ahead(self, caller: str, priority: int) -> int:
        """The size of all that waits and would have its turn before a newcomer."""
        ahead = sum(level.sizes.total() for other, level in self._levels.items() if other > priority)
        return ahead + self._num_ahead_within(caller, priority)

    def longest_wait_s(self, caller: str, priority: int) -> float:
        """Seconds within which a newcomer has its turn however many of higher priority wait, as its own rises.

        Infinite where nothing of higher priority waits.
        """
        levels_above = max(self._levels, default=priority) - priority
        if levels_above <= 0:
            return math.inf
        return SECONDS_PER_PRIORITY_LEVEL * levels_above * (self._num_ahead_within(caller, priority) + 1)

    def _num_ahead_within(self, caller: str, priority: int) -> int:
        level = self._levels.get(priority)
        if level is None:
            return 0
        turn = (level.sizes[caller] + 1) / self._weight(caller)  # of each, while it waits for its own
        return sum(
            size if other == caller else min(size, int(turn * self._weight(other)))
            for other, size in level.sizes.items()
        )

    # --- permits --------------------------------------------------------------------------------------

    def took(self, caller: str, size: int = 1) -> None:
        """The caller holds so many permits more."""
        self._held[caller] += size
        self._last_turns[caller] = next(self._numbers)

    def gave_back(self, caller: str, size: int = 1) -> None:
        """The caller holds so many permits less."""
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]
        self._forget(caller)

    def _forget(self, caller: str) -> None:
        """Nothing is remembered of callers without requests: there may be any number of them."""
        if caller not in self._held and not any(caller in level.waiting for level in self._levels.values()):
            self._last_turns.pop(caller, None)
