"""Several engines measured in turn, on one machine in one run.

The first engine is ours; every other is compared with it, round by round. While one is measured, the others are
stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.engines.client import EngineFailed
from bench.pausing import awake
from bench.peers import PeerMissing
from bench.results import Comparison, Curve, Measurement, RowResult, Target
from bench.row import Context
from bench.summary import ratios


class Engine(Protocol):
    """What is measured: an engine's process, or a server that only prefills for us."""

    name: str
    versions: dict[str, str]

    def prefill(self, tokens: int) -> float: ...

    def decode(self, *, batch: int, context: int, steps: int) -> float: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


Rate = Callable[[Engine], float]


@dataclass(kw_only=True)
class Contest:
    """Collects what a row reports. An engine that fails is left out from then on, and the notes say why."""

    context: Context
    engines: list[Engine]
    measurements: list[Measurement] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, context: Context, peers: Sequence[str]) -> Contest:
        """Start our engine in its precisions, and the peers where they are wanted and there.

        Raises EngineFailed when ours does not start.
        """
        contest = cls(
            context=context, engines=[context.engine("twinstage", **options) for options in context.engines.own]
        )
        for name in peers if context.peers is not None else ():
            try:
                contest.engines.append(context.engine(name))
            except (EngineFailed, PeerMissing) as error:
                contest.notes.append(f"Without {name}: {error}")
        for engine in contest.engines:
            engine.pause()
        return contest

    def measure(
        self, case: str, rate: Rate, *, quantity: str, unit: str, targets: Mapping[str, Target], warm_up: bool = True
    ) -> None:
        """Measure all engines in turn. `rate` gives a number of which more is better.

        `targets` are for the ratio to an engine whose name begins with the key.
        """
        self.context.progress(f"{quantity}, {case}: {', '.join(engine.name for engine in self.engines)}")
        values: dict[str, list[float]] = {engine.name: [] for engine in self.engines}
        for round_number in range(-1 if warm_up else 0, self.context.rounds):
            for engine in tuple(self.engines):
                value = self._try(engine, rate, case)
                if value is not None and round_number >= 0:
                    values[engine.name].append(value)
        complete = {name: found for name, found in values.items() if len(found) == self.context.rounds}
        for name, found in complete.items():
            self.measurements.append(Measurement(case=case, engine=name, quantity=quantity, unit=unit, values=found))
        self._compare(case, quantity, complete, targets)

    def result(self) -> RowResult:
        versions = {name: version for engine in self.engines for name, version in engine.versions.items()}
        return RowResult(
            measurements=self.measurements,
            comparisons=self.comparisons,
            curves=self.curves,
            notes=self.notes,
            versions=versions,
        )

    def _try(self, engine: Engine, rate: Rate, case: str) -> float | None:
        try:
            with awake(engine):
                return rate(engine)
        except EngineFailed as error:
            if engine is self.engines[0]:
                raise
            self.notes.append(f"{engine.name} failed at {case} and was left out from there: {error}")
            self.engines.remove(engine)
            engine.close()
            return None

    def _compare(
        self, case: str, quantity: str, values: Mapping[str, Sequence[float]], targets: Mapping[str, Target]
    ) -> None:
        (ours, own_values), *others = values.items()
        for name, found in others:
            if name.startswith("Twinstage"):
                continue
            target = next((target for start, target in targets.items() if name.startswith(start)), None)
            self.comparisons.append(
                Comparison(
                    case=case,
                    what=f"{quantity}, {ours} / {name}",
                    values=ratios(own_values, found),
                    target=target,
                )
            )
