"""The memory that a step works in, grown when a step has more rows than any before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twinstage.models.fused.fields import StepField
from twinstage.models.fused.memory import AlignedMemory

_POSITIONS_AT_ONCE = 1024

Table = NDArray[np.int64]


class StepBuffers:
    """Buffers with rows of fixed sizes, whose addresses stand in the step's table."""

    def __init__(self, table: Table, row_bytes: dict[StepField, int]) -> None:
        self._table = table
        self._row_bytes = row_bytes
        self._capacity = dict.fromkeys(row_bytes, 0)
        self._memory: dict[StepField, AlignedMemory] = {}

    def ensure(self, field: StepField, rows: int) -> None:
        """Make room for `rows` rows; what was there before may be lost."""
        if rows > self._capacity[field]:
            self._capacity[field] = max(rows, min(2 * self._capacity[field], rows + 256))
            self._memory[field] = AlignedMemory(self._capacity[field] * self._row_bytes[field])
            self._table[field] = self._memory[field].address

    def array(self, field: StepField, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The first bytes of a buffer as an array, until it is grown."""
        return self._memory[field].array(dtype, shape)


class RotaryTable:
    """Cosines and sines of the angles of all positions so far needed: float32 `[positions, head_dim / 2]`."""

    def __init__(self, table: Table, inverse_frequencies: tuple[float, ...], *, scale: float, positions: int) -> None:
        self._frequencies = np.array(inverse_frequencies, dtype=np.float32)
        self._scale = np.float32(scale)
        shape = (positions, len(self._frequencies))
        self._memory = [AlignedMemory(4 * positions * len(self._frequencies)) for _ in range(2)]
        self._cosines, self._sines = (memory.array(np.float32, shape) for memory in self._memory)
        self._ready = 0
        table[StepField.COSINES], table[StepField.SINES] = (memory.address for memory in self._memory)

    def ensure(self, positions: int) -> None:
        """Have the angles of positions `0 .. positions - 1`."""
        while self._ready < positions:
            chosen = slice(self._ready, self._ready + _POSITIONS_AT_ONCE)
            count = len(self._cosines[chosen])
            angles = np.arange(self._ready, self._ready + count, dtype=np.float32)[:, None] * self._frequencies
            self._cosines[chosen] = np.cos(angles) * self._scale
            self._sines[chosen] = np.sin(angles) * self._scale
            self._ready += count
