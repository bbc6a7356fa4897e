"""A run: a cluster, schedules played on it one after the other, and what was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from chaos.cases import AnsweredCase
from chaos.cluster import ChaosCluster
from chaos.faults import Saboteur
from chaos.invariants import Footprint, check_footprints, check_gone, check_idle, check_logs
from chaos.judge import Violation, judge
from chaos.lag import Lag
from chaos.load import Observation, failure_of, make_call
from chaos.schedule import Call, Fault, Schedule
from twinstage.v1 import admin_pb2

READY_S = 60.0  # from the last healing until all workers serve again
_PATIENCE_S = 180.0  # where nothing is broken
_TOGETHER = 16  # calls at once, when there is no schedule
_RESET_CODES = {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}  # a worker that is being lost cannot be told


@dataclass(slots=True, kw_only=True)
class Result:
    """What a run found. `idle_after_s`: how long blocks took to come back after each schedule."""

    began_s: float
    schedules: Sequence[Schedule]
    saboteur: Saboteur
    violations: list[Violation] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    resets: dict[str, int] = field(default_factory=dict)
    idle_after_s: list[float] = field(default_factory=list)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    seconds: float = 0.0
    longest_lag_s: float = 0.0  # of this process


class ChaosRun:
    """Plays schedules on one cluster, once. `say` gets a line for everything that is done.

    `heals_between`: after each schedule everything comes back before blocks are counted and the next one begins. Else
    what was killed may still be on its way, which is quicker.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        cases: Sequence[AnsweredCase],
        schedules: Sequence[Schedule],
        *,
        say: Callable[[str], None],
        heals_between: bool = True,
    ) -> None:
        self._cluster = cluster
        self._heals_between = heals_between
        self._cases = cases
        self._began_s = time.monotonic()
        self._say: Callable[[str], None] = lambda text: say(f"{time.monotonic() - self._began_s:8.2f} s  {text}")
        self._lag = Lag()
        self._saboteur = Saboteur(cluster, say=self._say)
        self._result = Result(began_s=self._began_s, schedules=schedules, saboteur=self._saboteur)

    async def play(self) -> Result:
        """Play all, let everything heal, and check what must hold; then end the cluster and check again."""
        async with self._lag.watching():
            await self._ask_everything()
            for schedule in self._result.schedules:
                await self._play(schedule)
            await self._recover()
        self._result.longest_lag_s = self._lag.longest_s
        self._result.seconds = time.monotonic() - self._began_s
        await self._cluster.stop()
        self._add(check_gone(self._cluster))
        for member in self._cluster.members.values():
            self._add(check_logs(member))
        return self._result

    async def _ask_everything(self) -> None:
        """Every case once while nothing is broken."""
        # The first ones have workers import XGrammar, one after the other, which takes a busy machine long.
        calls = [
            Call(at_s=0.0, case=index, is_streamed=True, deadline_s=_PATIENCE_S) for index in range(len(self._cases))
        ]
        for start in range(0, len(calls), _TOGETHER):
            await asyncio.gather(*(self._call(call, seed=0) for call in calls[start : start + _TOGETHER]))

    async def _play(self, schedule: Schedule) -> None:
        """One schedule, until its calls have ended; processes that come back may still be on their way."""
        self._say(f"seed {schedule.seed}: {len(schedule.faults)} faults, {len(schedule.calls)} calls")
        began_s = time.monotonic()

        async def at(at_s: float, action: Coroutine[Any, Any, None]) -> None:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            await action

        async with asyncio.TaskGroup() as group:
            for fault in schedule.faults:
                group.create_task(at(fault.at_s, self._sabotage(fault, seed=schedule.seed)))
            for call in schedule.calls:
                group.create_task(at(call.at_s, self._call(call, seed=schedule.seed)))
            for at_s in schedule.resets:
                group.create_task(at(at_s, self._reset(seed=schedule.seed)))
        if self._heals_between:
            await self._heal(schedule.seed)
        await self._check_idle(schedule.seed)

    async def _sabotage(self, fault: Fault, *, seed: int) -> None:
        await self._saboteur.carry_out(fault, seed=seed)

    async def _call(self, call: Call, *, seed: int) -> None:
        answered = self._cases[call.case]
        observation = await make_call(self._cluster.channel, call, answered, seed=seed)
        lag_s = self._lag.total_s(observation.began_s, observation.ended_s)
        self._add(judge(observation, answered.answer, self._saboteur, observer_lag_s=lag_s))
        observation.received.forget_content()
        self._result.observations.append(observation)

    async def _reset(self, *, seed: int) -> None:
        code = "OK"
        try:
            await self._cluster.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code not in _RESET_CODES:
                failure = failure_of(error)
                self._add([Violation("wrong status", f"ResetPrefixCache: {code} {failure.message}", seed)])
        self._result.resets[code] = self._result.resets.get(code, 0) + 1

    async def _check_idle(self, seed: int | None) -> None:
        idle_after_s, violations = await check_idle(self._cluster)
        self._result.idle_after_s.append(idle_after_s)
        self._add(Violation(found.kind, found.what, seed) for found in violations)

    async def _heal(self, seed: int | None) -> None:
        """Wait until everything is up again."""
        await self._saboteur.healed()
        try:
            await self._cluster.wait_ready(READY_S)
        except TimeoutError:
            states = [f"{worker.id}: {worker.state} {worker.detail}" for worker in await self._cluster.workers()]
            self._add([Violation("not ready", f"after {READY_S:.0f} s: {'; '.join(states)}", seed)])

    async def _recover(self) -> None:
        """Let everything heal, ask everything once more, and see what the processes hold."""
        await self._heal(None)
        self._add(Violation("not ready", what) for what in self._saboteur.failures)
        await self._check_idle(None)
        self._saboteur.forgive()
        await self._ask_everything()
        await self._check_idle(None)
        self._add(check_footprints(self._cluster))
        self._result.footprints = {
            member.name: Footprint.of(member.process.pid)
            for member in self._cluster.members.values()
            if member.process is not None
        }

    def _add(self, violations: Iterable[Violation]) -> None:
        for violation in violations:
            self._say(f"VIOLATION {violation}")
            self._result.violations.append(violation)
