"""Limits of control groups, as the kernel writes them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from twinstage import cgroups
from twinstage.cgroups import cpu_quota, memory_limit

V2_HOST = ("0::/machine/job/step\n", {"machine/job/cpu.max": "150000 100000", "machine/job/step/cpu.max": "max 100000"})
CASES: dict[str, tuple[str, dict[str, str], float]] = {
    "version 2, in a container": ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
    "version 2, a group above": (*V2_HOST, 1.5),
    "version 2, no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    "version 1, at the root of a container": (
        "4:cpu,cpuacct:/docker/0123\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        0.5,
    ),
    "version 1, in its group": (
        "11:memory:/a\n2:cpu:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1"},
        3.0,
    ),
    "version 1, no limit": (
        "2:cpu:/\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "version 1, of another controller": ("2:cpuset:/\n", {"cpu.cfs_quota_us": "100"}, math.inf),
    "damaged": ("nonsense\n\n::\n", {"cpu.max": "\n"}, math.inf),
    "nothing to read": ("", {}, math.inf),
}


def _write(directory: Path, cgroup: str, files: dict[str, str]) -> dict[str, Path]:
    for name, text in ({"proc/self/cgroup": cgroup} | {f"sys/{name}": text for name, text in files.items()}).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": directory / "proc", "sysfs": directory / "sys"}


@pytest.mark.parametrize("case", CASES)
def test_cpu_quotas(tmp_path: Path, case: str) -> None:
    cgroup, files, expected = CASES[case]
    assert cpu_quota(**_write(tmp_path, cgroup, files)) == expected


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "1000000\n"}, 1e6),
        ("0::/a/b\n", {"a/memory.max": "500", "a/b/memory.max": "max"}, 500),
        ("8:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, math.inf),
        ("8:memory:/x\n", {"memory/memory.limit_in_bytes": "4096"}, 4096),
    ],
)
def test_memory_limits(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float) -> None:
    assert memory_limit(**_write(tmp_path, cgroup, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(math.inf, 4), (8.0, 4), (3.9, 3), (1.5, 1), (0.2, 1)])
def test_threads_are_no_more_than_quota_and_cpus(monkeypatch: pytest.MonkeyPatch, quota: float, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert cgroups.usable_cpus() == expected
