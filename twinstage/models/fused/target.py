"""The CPU that kernels are compiled for. Free of Numba, as a worker with compiled kernels at hand does not import it.

By default the CPU of this machine. `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`, Numba's own variables, choose another,
such as `NUMBA_CPU_NAME=haswell` for a machine without AVX-512.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Target:
    """A CPU in LLVM's terms, and the width of its vector registers."""

    cpu: str
    features: str  # "+avx2,-avx512f,..."; empty: those that the name implies
    lanes: int  # float32 values in one vector register

    @property
    def panel(self) -> int:
        """Columns that a register tile computes side by side."""
        return 2 * self.lanes

    @property
    def tile_rows(self) -> int:
        """Rows of the largest register tile: accumulators, two weights and a broadcast fill the register file."""
        return 12 if self.lanes == 16 else 6

    @property
    def integer_dot(self) -> bool:
        """Whether one instruction multiplies and adds bytes to 32-bit integers (AVX-512 VNNI, AVX-VNNI)."""
        listed = self.features.split(",")
        return "+avx512vnni" in listed or "+avxvnni" in listed or self.cpu.startswith(_WITH_INTEGER_DOT)

    @property
    def bfloat16_dot(self) -> bool:
        """Whether one instruction multiplies and adds pairs of bfloat16 numbers, of whole registers (AVX512_BF16)."""
        return self.lanes == 16 and ("+avx512bf16" in self.features.split(",") or self.cpu in _WITH_BFLOAT16_DOT)


@cache
def target() -> Target:
    """The target of this process."""
    import llvmlite.binding as llvm  # stock modules run where LLVM cannot be loaded

    host = llvm.get_host_cpu_features()
    cpu = os.environ.get("NUMBA_CPU_NAME", "")
    if not cpu:
        features = os.environ.get("NUMBA_CPU_FEATURES") or host.flatten()
        return Target(llvm.get_host_cpu_name(), features, 16 if "+avx512f" in features.split(",") else 8)
    # Numba switches features by name alone as well; a generic name means a CPU of which nothing more is known.
    features = os.environ.get("NUMBA_CPU_FEATURES", "")
    return Target(cpu, features, 16 if "+avx512f" in features.split(",") or _has_avx512(cpu) else 8)


def missing_features() -> str:
    """What this machine lacks for the kernels, in words; empty when nothing does."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"kernels for {platform.machine()} processors"
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError) as error:  # not installed, or its library cannot be loaded
        return f"llvmlite ({error})"
    host = llvm.get_host_cpu_features()
    lacking = [name for name in ("avx2", "fma") if not host.get(name, False)]
    return " and ".join(name.upper() for name in lacking)


_WITH_INTEGER_DOT = ("cascadelake", "icelake", "sapphirerapids", "znver4", "znver5")
_WITH_BFLOAT16_DOT = ("cooperlake", "sapphirerapids", "graniterapids", "znver4", "znver5")


def _has_avx512(cpu: str) -> bool:
    return cpu.startswith(("skylake-avx512", *_WITH_INTEGER_DOT))
