"""The phases of a request in each role, and the object that moves through them and stamps the clock.

    router   ADMITTED -> PLACED -> RESERVING -> PREFILLING -> DECODING -> DONE
    prefill  QUEUED -> COMPUTING -> SENDING -> DONE
    decode   RESERVED -> RECEIVING -> QUEUED -> DECODING -> DONE

Forward edges may skip the phases a request does not need (a request of one token is never reserved), and two edges
go back: the router places again after a worker failed, and decode queues again after a preemption. Any phase may go
to DONE, which is entered once and carries an `Outcome`. The names are also the keys of logs.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from twinstage.errors import IllegalTransition, TwinstageError
from twinstage.types import FinishReason


class RouterPhase(enum.Enum):
    """Phases of a request in the router."""

    ADMITTED = "admitted"
    PLACED = "placed"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


class PrefillPhase(enum.Enum):
    """Phases of a request in a prefill worker."""

    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"
    DONE = "done"


class DecodePhase(enum.Enum):
    """Phases of a request in a decode worker."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    QUEUED = "queued"
    DECODING = "decoding"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation ended by itself; `reason` is None on a prefill worker, when it goes on at a decode worker."""

    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class CancelledOutcome:
    """The caller went away, or an operator ended the request."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed."""

    error: TwinstageError


Outcome = Finished | CancelledOutcome | Failed

Phase = TypeVar("Phase", bound=enum.Enum)

ROUTER_TRANSITIONS: Mapping[RouterPhase, frozenset[RouterPhase]] = {
    RouterPhase.ADMITTED: frozenset({RouterPhase.PLACED}),
    RouterPhase.PLACED: frozenset({RouterPhase.RESERVING, RouterPhase.PREFILLING, RouterPhase.PLACED}),
    RouterPhase.RESERVING: frozenset({RouterPhase.PREFILLING, RouterPhase.PLACED}),
    RouterPhase.PREFILLING: frozenset({RouterPhase.DECODING, RouterPhase.PLACED}),
    RouterPhase.DECODING: frozenset({RouterPhase.PLACED}),
    RouterPhase.DONE: frozenset(),
}
PREFILL_TRANSITIONS: Mapping[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.QUEUED: frozenset({PrefillPhase.COMPUTING}),
    PrefillPhase.COMPUTING: frozenset({PrefillPhase.SENDING}),
    PrefillPhase.SENDING: frozenset(),
    PrefillPhase.DONE: frozenset(),
}
DECODE_TRANSITIONS: Mapping[DecodePhase, frozenset[DecodePhase]] = {
    DecodePhase.RESERVED: frozenset({DecodePhase.RECEIVING}),
    DecodePhase.RECEIVING: frozenset({DecodePhase.QUEUED}),
    DecodePhase.QUEUED: frozenset({DecodePhase.DECODING}),
    DecodePhase.DECODING: frozenset({DecodePhase.QUEUED}),
    DecodePhase.DONE: frozenset(),
}


class Lifecycle(Generic[Phase]):
    """The present phase of one request, when it entered each phase first, and how it ended.

    Not thread-safe: a lifecycle belongs to one thread or event loop at a time.
    """

    def __init__(
        self,
        transitions: Mapping[Phase, frozenset[Phase]],
        start: Phase,
        *,
        done: Phase,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transitions = transitions
        self._done = done
        self._clock = clock
        self._phase: Phase = start
        self._entered_s: dict[Phase, float] = {start: clock()}
        self._outcome: Outcome | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None while it lives."""
        return self._outcome

    def advance(self, phase: Phase) -> None:
        """Enter `phase`. Raises IllegalTransition when it cannot follow the present one."""
        if phase not in self._transitions[self._phase]:
            raise IllegalTransition(f"{self._phase.name} -> {phase.name} is not a transition")
        self._phase = phase
        self._entered_s.setdefault(phase, self._clock())

    def finish(self, outcome: Outcome) -> None:
        """Enter DONE. Raises IllegalTransition the second time."""
        if self._outcome is not None:
            raise IllegalTransition(f"already done: {self._outcome}")
        self._phase = self._done
        self._outcome = outcome
        self._entered_s[self._done] = self._clock()

    def seconds_between(self, start: Phase, end: Phase) -> float:
        """Time between first entering two phases; 0.0 when either was skipped."""
        if start not in self._entered_s or end not in self._entered_s:
            return 0.0
        return max(0.0, self._entered_s[end] - self._entered_s[start])


def router_lifecycle() -> Lifecycle[RouterPhase]:
    """The lifecycle of a request that the router has just admitted."""
    return Lifecycle(ROUTER_TRANSITIONS, RouterPhase.ADMITTED, done=RouterPhase.DONE)


def prefill_lifecycle() -> Lifecycle[PrefillPhase]:
    """The lifecycle of a request that a prefill worker has just queued."""
    return Lifecycle(PREFILL_TRANSITIONS, PrefillPhase.QUEUED, done=PrefillPhase.DONE)


def decode_lifecycle() -> Lifecycle[DecodePhase]:
    """The lifecycle of a request for which a decode worker has just reserved blocks."""
    return Lifecycle(DECODE_TRANSITIONS, DecodePhase.RESERVED, done=DecodePhase.DONE)
