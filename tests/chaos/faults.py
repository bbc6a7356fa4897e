"""Carries faults out, heals them, and remembers what was done when."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos.cluster import ChaosCluster
from chaos.schedule import Fault, FaultKind

SETTLE_S = 6.0  # until nothing that happens is the work of a healed fault any more: the router's longest pauses


@dataclass(slots=True, kw_only=True)
class Done:
    """A fault that was carried out. Times are readings of the monotonic clock; `healed_s` is None until it is over."""

    fault: Fault
    seed: int
    began_s: float
    healed_s: float | None = None
    settled_s: float = math.inf

    def heal(self) -> None:
        self.healed_s = time.monotonic()
        self.settled_s = self.healed_s + SETTLE_S

    def may_explain(self, began_s: float, ended_s: float) -> bool:
        """Whether a failure of a call in this time can be the fault's work."""
        return self.began_s <= ended_s and began_s <= self.settled_s


class Saboteur:
    """Does one cluster harm. A fault whose target is down, stopped or failing already is skipped."""

    def __init__(self, cluster: ChaosCluster, *, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._busy: set[str] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self.done: list[Done] = []
        self.skipped: list[Fault] = []
        self.failures: list[str] = []

    async def carry_out(self, fault: Fault, *, seed: int) -> None:
        """Begin the fault, and return when it is over; what was killed comes back by itself, later."""
        target = fault.target.split(":")[-1]  # a worker, and the links to it, fail in one way at a time
        if target in self._busy:
            self.skipped.append(fault)
            return
        self._busy.add(target)
        done = Done(fault=fault, seed=seed, began_s=time.monotonic())
        self.done.append(done)
        self._say(f"{fault}")
        if fault.kind in (FaultKind.KILL, FaultKind.TERMINATE, FaultKind.ROUTER_KILL):
            restart = asyncio.create_task(self._restart(done, target))
            self._restarts.add(restart)
            return
        try:
            await self._disturb(fault)
        finally:
            done.heal()
            self._busy.discard(target)

    def forgive(self) -> None:
        """From now on nothing that goes wrong is the work of a fault."""
        for done in self.done:
            done.settled_s = min(done.settled_s, time.monotonic())

    async def healed(self) -> None:
        """Return when everything is up and whole again."""
        while self._restarts:
            await asyncio.gather(*self._restarts)
            self._restarts = {task for task in self._restarts if not task.done()}

    async def _restart(self, done: Done, target: str) -> None:
        fault, member = done.fault, self._cluster.members[target]
        try:
            number = signal.SIGTERM if fault.kind is FaultKind.TERMINATE else signal.SIGKILL
            await self._cluster.end(member, number)
            await asyncio.sleep(fault.duration_s)
            await self._cluster.start(member)
        except (AssertionError, TimeoutError) as error:
            self.failures.append(f"{target} did not come back: {error!r}"[:2000])
        finally:
            done.heal()
            self._busy.discard(target)

    async def _disturb(self, fault: Fault) -> None:
        if fault.kind is FaultKind.CANCEL_BURST:
            await asyncio.sleep(fault.duration_s)  # the calls are in the schedule
        elif fault.kind in (FaultKind.STOP, FaultKind.ROUTER_STOP):
            await self._stop(fault)
        else:
            await self._break_link(fault)

    async def _stop(self, fault: Fault) -> None:
        member = self._cluster.members[fault.target]
        assert member.process is not None
        member.process.send(signal.SIGSTOP)
        member.stopped = True
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            member.process.send(signal.SIGCONT)
            member.stopped = False

    async def _break_link(self, fault: Fault) -> None:
        link = self._cluster.links[fault.target]
        match fault.kind:
            case FaultKind.CUT:
                link.cut()
            case FaultKind.DELAY:
                link.delay_s = fault.delay_s
            case FaultKind.DEAF:
                link.block(backward=False)
            case FaultKind.MUTE:
                link.block(forward=False)
            case _:
                link.block()
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            link.heal()

    def router_was_down(self, began_s: float, ended_s: float) -> bool:
        """Whether a call in this time may have met no router."""
        return any(
            done.fault.kind is FaultKind.ROUTER_KILL and done.may_explain(began_s, ended_s) for done in self.done
        )
