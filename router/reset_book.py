"""Which resets of prefix caches were asked for, and which workers have had them.

A reset concerns every worker in its scope, also one that cannot be told now: one that is being connected, is lost, has
left discovery, or was never heard of. Such a worker owes it, and is told before it serves. Workers go by their key: one
that comes back under any address is known, a restarted one counts as new.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from router.placement import WorkerKey
from twinstage.types import WorkerDescription

MAX_SCOPES = 256
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Scope:
    """Which workers a reset is for; an empty field means all."""

    model: str = ""
    worker_id: str = ""

    def covers(self, description: WorkerDescription) -> bool:
        return self.model in ("", description.model.name) and self.worker_id in ("", description.worker_id)


EVERYTHING = Scope()


class ResetBook:
    """Numbers the resets. What is forgotten to stay small costs a worker one more reset, never one less."""

    def __init__(self) -> None:
        self._last = 0
        self._asked: dict[Scope, int] = {}  # the latest reset of each scope
        self._had: OrderedDict[WorkerKey, int] = OrderedDict()  # up to which reset a worker has had all of them

    def ask(self, scope: Scope) -> None:
        """From now on, whoever is in `scope` owes a reset."""
        self._last += 1
        self._asked[scope] = self._last
        if len(self._asked) > MAX_SCOPES:
            self._asked = {EVERYTHING: self._last}

    def owed(self, description: WorkerDescription) -> int:
        """The latest reset that this worker has not had; 0 when it owes none."""
        asked = max((number for scope, number in self._asked.items() if scope.covers(description)), default=0)
        return asked if asked > self._had.get(_key(description), 0) else 0

    def had(self, description: WorkerDescription, number: int) -> None:
        """The worker was reset after reset `number`, as `owed` gave it, was asked for."""
        key = _key(description)
        self._had[key] = max(number, self._had.pop(key, 0))
        if len(self._had) > MAX_WORKERS:
            self._had.popitem(last=False)


def _key(description: WorkerDescription) -> WorkerKey:
    return WorkerKey(description.worker_id, description.epoch)
