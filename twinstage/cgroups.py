"""What the control groups of this process let it have: CPU time and memory. cgroups(7), versions 1 and 2. Linux only.

A container's limits are those of its group and of all groups above it, as far as they can be seen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _SYSFS = Path("/proc"), Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number of about 2^63 where there is no limit


def usable_cpus() -> int:
    """Threads that can compute at once: the CPUs that this process may run on, and no more than its group's quota.

    Of a quota of 1.5 one is used. Threads that wait for one another at barriers are all stopped for the rest of a
    period when their group has used up its time, so the second thread would bring gaps of tens of milliseconds.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(*, proc: Path = _PROC, sysfs: Path = _SYSFS) -> float:
    """CPUs that this process may use at a time on average, such as 1.5; infinite without a limit."""
    limits = []
    for group in _groups("cpu", proc, sysfs):
        quota, period = _words(group / "cpu.max")[:2] or (_word(group / "cpu.cfs_quota_us"), "")
        period = period or _word(group / "cpu.cfs_period_us")
        if _is_count(quota) and _is_count(period):  # not "max", and not -1
            limits.append(int(quota) / int(period))
    return min(limits, default=math.inf)


def memory_limit(*, proc: Path = _PROC, sysfs: Path = _SYSFS) -> float:
    """Bytes that this process and those with it may have in memory; infinite without a limit."""
    found = []
    for group in _groups("memory", proc, sysfs):
        found += [_word(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((int(text) for text in found if _is_count(text) and int(text) < _UNLIMITED_BYTES), default=math.inf)


def _groups(controller: str, proc: Path, sysfs: Path) -> Iterator[Path]:
    """The directories of the groups of this process that may limit what `controller` gives out."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if not controllers:
            root = sysfs
        elif controller in controllers.split(","):
            root = next((sysfs / name for name in (controllers, controller) if (sysfs / name).is_dir()), sysfs)
        else:
            continue
        # A container may see its group's path on the host, but the group itself at the root.
        relative = Path(path.strip("/"))
        yield root
        for depth in range(len(relative.parts)):
            yield root.joinpath(*relative.parts[: depth + 1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _word(path: Path) -> str:
    return (_words(path) or [""])[0]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0
