"""CPUs of this machine: as people write them (`0-3,8`), shared out among processes, and bound to one. Linux only."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from twinstage.errors import ConfigError


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers in a list such as `0-3,8`, ascending. Raises ValueError when it is anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = (end.strip() for end in part.partition("-"))
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(f"{text!r} is no list of CPUs such as 0-3,8")
        cpus.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest list that `parse_cpus` reads as `cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def by_core(cpus: Iterable[int], *, sysfs: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """`cpus` in the order of sockets and cores, so that the hardware threads of one core are neighbours.

    Their numbers often are not: with four cores, 0 and 4 may be one. A CPU of which the kernel tells nothing is a core
    of its own.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            socket, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return 0, cpu, cpu
        return socket, core, cpu

    return tuple(sorted(cpus, key=place))


def share_out(cpus: Sequence[int], num_shares: int) -> list[tuple[int, ...]] | None:
    """Consecutive `cpus` for each of `num_shares` processes, as evenly as it goes; None when there are too few."""
    if num_shares < 1 or len(cpus) < num_shares:
        return None
    borders = [len(cpus) * share // num_shares for share in range(num_shares + 1)]
    return [tuple(cpus[first:last]) for first, last in itertools.pairwise(borders)]


def bind_process(cpus: Iterable[int]) -> None:
    """Let every thread of this process, and those that they start, run on `cpus` only.

    Raises ConfigError when the machine, or the group that this process belongs to, lacks them.
    """
    wanted = set(cpus)
    missing = wanted - os.sched_getaffinity(0)
    if missing:
        raise ConfigError(f"--cpus {format_cpus(wanted)}: this process may not use CPU {format_cpus(missing)}")
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread_id), wanted)
