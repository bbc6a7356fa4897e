"""What happens when: a pure function of a seed. Times are seconds from the beginning of the schedule."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random


class FaultKind(enum.Enum):
    """What is done to a target."""

    KILL = "kill"  # SIGKILL, and started again after `duration_s`
    TERMINATE = "terminate"  # SIGTERM, and started again as soon as it has ended
    STOP = "stop"  # SIGSTOP, and SIGCONT after `duration_s`
    PARTITION = "partition"  # nothing crosses the link, in either direction, for `duration_s`
    DEAF = "deaf"  # nothing crosses the link towards the worker
    MUTE = "mute"  # nothing crosses the link from the worker
    DELAY = "delay"  # everything on the link is `delay_s` late
    CUT = "cut"  # every connection of the link is reset, once
    ROUTER_KILL = "router-kill"  # SIGKILL of the router, and started again after `duration_s`
    ROUTER_STOP = "router-stop"  # SIGSTOP of the router, and SIGCONT after `duration_s`
    CANCEL_BURST = "cancel-burst"  # many calls at once, each cancelled within `duration_s`


# How often each kind is drawn, relative to the others.
FREQUENCIES: Mapping[FaultKind, float] = {
    FaultKind.KILL: 5,
    FaultKind.TERMINATE: 2,
    FaultKind.STOP: 4,
    FaultKind.PARTITION: 2,
    FaultKind.DEAF: 1,
    FaultKind.MUTE: 1,
    FaultKind.DELAY: 2,
    FaultKind.CUT: 3,
    FaultKind.ROUTER_KILL: 1,
    FaultKind.ROUTER_STOP: 1,
    FaultKind.CANCEL_BURST: 2,
}
_LINK_FAULTS = frozenset({FaultKind.PARTITION, FaultKind.DEAF, FaultKind.MUTE, FaultKind.DELAY, FaultKind.CUT})
ROUTER = "router"
CLIENTS = "clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `target` is a worker, the router, a link (`router:WORKER` or `kv:WORKER`) or the clients."""

    at_s: float
    kind: FaultKind
    target: str
    duration_s: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        late = f" by {self.delay_s * 1000:.0f} ms" if self.delay_s else ""
        lasting = f" for {self.duration_s:.2f} s" if self.duration_s else ""
        return f"{self.kind.value} {self.target}{late}{lasting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request: which of the cases, how, and when its client loses interest."""

    at_s: float
    case: int
    is_streamed: bool
    deadline_s: float
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a schedule is drawn for: who can fail, how long it takes, and how dense it is.

    Drawing ends after `seconds` or after `num_faults`, whichever comes first. The rates are means, per second.
    """

    workers: tuple[str, ...]
    links: tuple[str, ...]
    num_cases: int
    seconds: float
    lasting: tuple[str, ...] = ()  # workers that are not restarted
    num_faults: int | None = None
    faults_per_s: float = 0.4
    calls_per_s: float = 4.0
    resets_per_s: float = 0.05
    burst: int = 24  # calls in a burst of cancels
    longest_fault_s: float = 4.0
    patience_s: float = 60.0  # the deadline of a call whose client can wait
    kinds: Mapping[FaultKind, float] = field(default_factory=lambda: FREQUENCIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Faults, calls and resets of the prefix caches, each in order of time."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    calls: tuple[Call, ...]
    resets: tuple[float, ...]


def to_json(schedules: Sequence[Schedule]) -> str:
    """The schedules as they can be read by `from_json`."""
    return json.dumps([asdict(schedule) for schedule in schedules], default=lambda value: value.value)


def from_json(text: str) -> list[Schedule]:
    """Schedules to play again."""
    return [
        Schedule(
            seed=values["seed"],
            seconds=values["seconds"],
            faults=tuple(Fault(**{**fault, "kind": FaultKind(fault["kind"])}) for fault in values["faults"]),
            calls=tuple(Call(**call) for call in values["calls"]),
            resets=tuple(values["resets"]),
        )
        for values in json.loads(text)
    ]


def draw_rounds(seed: int, plan: Plan, *, round_s: float) -> list[Schedule]:
    """The schedules of `seed`, `seed + 1` and so on, until the plan's seconds or its faults are used up."""
    schedules: list[Schedule] = []
    seconds, num_faults = plan.seconds, plan.num_faults
    while seconds > 0 and (num_faults is None or num_faults > 0):
        part = replace(plan, seconds=min(seconds, round_s), num_faults=num_faults)
        schedules.append(draw(seed + len(schedules), part))
        seconds -= round_s
        if num_faults is not None:
            num_faults -= len(schedules[-1].faults)
    return schedules


def draw(seed: int, plan: Plan) -> Schedule:
    """The schedule of a seed: the same for the same plan, always."""
    faults = tuple(_draw_faults(Random(f"faults {seed}"), plan))
    seconds = plan.seconds
    if plan.num_faults is not None and len(faults) == plan.num_faults:
        seconds = min(seconds, faults[-1].at_s + faults[-1].duration_s + 1 / plan.faults_per_s)
    calls = list(_draw_calls(Random(f"calls {seed}"), plan, seconds))
    for fault in faults:
        if fault.kind is FaultKind.CANCEL_BURST:
            calls += _burst(Random(f"burst {seed} {fault.at_s}"), plan, fault)
    resets = tuple(_moments(Random(f"resets {seed}"), plan.resets_per_s, seconds))
    return Schedule(
        seed=seed,
        seconds=round(seconds, 3),
        faults=faults,
        calls=tuple(sorted(calls, key=lambda call: call.at_s)),
        resets=resets,
    )


def _moments(random: Random, per_s: float, seconds: float) -> Iterator[float]:
    """Moments that have nothing to do with one another."""
    at_s = random.expovariate(per_s) if per_s else seconds
    while at_s < seconds:
        yield round(at_s, 3)
        at_s += random.expovariate(per_s)


def _draw_faults(random: Random, plan: Plan) -> Iterator[Fault]:
    kinds = [kind for kind, weight in plan.kinds.items() if weight and (kind not in _LINK_FAULTS or plan.links)]
    weights = [plan.kinds[kind] for kind in kinds]
    for number, at_s in enumerate(_moments(random, plan.faults_per_s, plan.seconds)):
        if plan.num_faults is not None and number >= plan.num_faults:
            return
        kind = random.choices(kinds, weights)[0]
        yield Fault(
            at_s=at_s,
            kind=kind,
            target=_target(random, kind, plan),
            duration_s=_duration_s(random, kind, plan.longest_fault_s),
            delay_s=round(random.uniform(0.02, 0.3), 3) if kind is FaultKind.DELAY else 0.0,
        )


def _target(random: Random, kind: FaultKind, plan: Plan) -> str:
    if kind in (FaultKind.ROUTER_KILL, FaultKind.ROUTER_STOP):
        return ROUTER
    if kind is FaultKind.CANCEL_BURST:
        return CLIENTS
    if kind in (FaultKind.KILL, FaultKind.TERMINATE):
        return random.choice([worker for worker in plan.workers if worker not in plan.lasting])
    return random.choice(plan.links if kind in _LINK_FAULTS else plan.workers)


def _duration_s(random: Random, kind: FaultKind, longest_s: float) -> float:
    """Many are short, some so long that peers must notice; what has no length gets none."""
    if kind in (FaultKind.CUT, FaultKind.TERMINATE):
        return 0.0
    if kind is FaultKind.CANCEL_BURST:
        return 0.3
    if kind in (FaultKind.KILL, FaultKind.ROUTER_KILL):
        longest_s = min(longest_s, 1.0)
    return round(random.choice((0.15, 0.5, 1.0)) * random.uniform(0.3, 1.0) * longest_s, 3)


def _draw_calls(random: Random, plan: Plan, seconds: float) -> Iterator[Call]:
    for at_s in _moments(random, plan.calls_per_s, seconds):
        deadline_s, cancel_after_s = plan.patience_s, None
        fate = random.random()
        if fate < 0.08:
            deadline_s = round(random.uniform(0.02, 0.8), 3)
        elif fate < 0.2:
            cancel_after_s = round(random.expovariate(3.0), 3)
        yield Call(
            at_s=at_s,
            case=random.randrange(plan.num_cases),
            is_streamed=random.random() < 0.7,
            deadline_s=deadline_s,
            cancel_after_s=cancel_after_s,
        )


def _burst(random: Random, plan: Plan, fault: Fault) -> Iterator[Call]:
    for _ in range(plan.burst):
        yield Call(
            at_s=fault.at_s,
            case=random.randrange(plan.num_cases),
            is_streamed=random.random() < 0.5,
            deadline_s=plan.patience_s,
            cancel_after_s=round(random.uniform(0.0, fault.duration_s), 3),
        )
