"""The machine that was measured on, and whether it was quiet meanwhile."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Of all CPU time while a row ran. What others take is missing from the figures, and moves them from round to round.
MAX_OTHERS_SHARE = 0.05
MAX_STEAL_SHARE = 0.02
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides how fast things can be. `cores` are those that this process may use."""

    cpu: str
    features: tuple[str, ...]
    cores: int
    memory_gib: float
    kernel: str
    python: str


def describe_machine() -> Machine:
    """This machine."""
    fields: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    memory_kib = int(_field(_read("/proc/meminfo"), "MemTotal:", "0"))
    return Machine(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        features=tuple(feature for feature in _FEATURES if feature in flags),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_kib / 2**20, 1),
        kernel=platform.release(),
        python=platform.python_version(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """Who used the CPUs while a row ran, as shares of all CPU time; `load_average` is that of the minute before it."""

    load_average: float
    own_share: float
    others_share: float
    steal_share: float

    @property
    def remarks(self) -> list[str]:
        """Why the figures deserve less trust; empty on a quiet machine."""
        found = []
        if self.others_share > MAX_OTHERS_SHARE:
            found.append(f"other processes used {self.others_share:.0%} of the CPU time")
        if self.steal_share > MAX_STEAL_SHARE:
            found.append(f"the hypervisor withheld {self.steal_share:.0%} of it")
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_quiet": not self.remarks, "remarks": self.remarks}


class LoadWatch:
    """Looks at the CPU's books at the start and at the end."""

    def __init__(self) -> None:
        self._load_average = os.getloadavg()[0]
        self._totals = _cpu_totals()
        self._own_s = _own_cpu_s()

    def finish(self) -> MachineLoad:
        """What happened since this was made."""
        used, idle, stolen = (now - before for now, before in zip(_cpu_totals(), self._totals, strict=True))
        total = max(used + idle + stolen, 1e-9)
        own = _own_cpu_s() - self._own_s
        return MachineLoad(
            load_average=round(self._load_average, 2),
            own_share=round(own / total, 3),
            others_share=round(max(0.0, used - own) / total, 3),
            steal_share=round(stolen / total, 3),
        )


def _cpu_totals() -> tuple[float, float, float]:
    """Seconds that all CPUs together worked, idled, and were withheld, since the machine started. proc_stat(5)."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, _read("/proc/stat").split("\n")[0].split()[1:9])
    return (
        (user + nice + system + irq + softirq) / _TICKS_PER_S,
        (idle + iowait) / _TICKS_PER_S,
        steal / _TICKS_PER_S,
    )


def _own_cpu_s() -> float:
    """CPU seconds of this process and all that descend from it, those that have ended among them."""
    parents: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name of the process, in parentheses, may hold anything; the numbers come after it.
            numbers = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(entry.name)
        parents.setdefault(int(numbers[1]), []).append(process)
        seconds[process] = sum(map(int, numbers[11:15])) / _TICKS_PER_S  # its own, and of children it waited for
    found, total = [os.getpid()], 0.0
    while found:
        process = found.pop()
        total += seconds.get(process, 0.0)
        found += parents.get(process, [])
    return total


def cpu_seconds(process: int) -> float:
    """CPU seconds that a process has used, without its children. proc_pid_stat(5)."""
    return sum(map(int, _read(f"/proc/{process}/stat").rpartition(")")[2].split()[11:13])) / _TICKS_PER_S


def resident_bytes(process: int) -> int:
    """The resident memory of a process. proc_pid_status(5)."""
    return int(_field(_read(f"/proc/{process}/status"), "VmRSS:", "0")) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The resident memory of a process in bytes: mapped weight files, shared memory, and everything else."""

    weights_bytes: int
    shared_bytes: int
    other_bytes: int


def memory_use(process: int, *, weights_below: Path) -> MemoryUse:
    """What a process has in memory. Mapped files below `weights_below` are weights, memfds are shared memory."""
    return parse_memory_use(_read(f"/proc/{process}/smaps"), weights_below=str(weights_below.resolve()))


def parse_memory_use(smaps: str, *, weights_below: str) -> MemoryUse:
    """Of the text of proc_pid_smaps(5)."""
    totals = {"weights": 0, "shared": 0, "other": 0}
    kind = "other"
    for line in smaps.splitlines():
        fields = line.split(maxsplit=5)
        if "-" in fields[0]:  # the head of a mapping: addresses, permissions, offset, device, inode, path
            path = fields[5] if len(fields) > 5 else ""
            kind = "weights" if path.startswith(weights_below) else "shared" if "memfd:" in path else "other"
        elif fields[0] == "Rss:":
            totals[kind] += int(fields[1]) * 1024
    return MemoryUse(weights_bytes=totals["weights"], shared_bytes=totals["shared"], other_bytes=totals["other"])


def _field(text: str, name: str, otherwise: str) -> str:
    return next((line.split()[1] for line in text.splitlines() if line.startswith(name)), otherwise)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
