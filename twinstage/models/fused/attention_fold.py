"""How the result of a tile joins those of the tiles before it: the arithmetic that prefill and decode share.

A row's state, and the result of a tile, are a highest score m, a sum l of weights 2^(score - m), and a sum o of values
so weighted. With M = max(m1, m2): l = l1 * 2^(m1 - M) + (l2 * 2^(m2 - M)), and the same for o, where the first product
and the sum are one fused operation. A tile of which a row sees nothing (l = 0, m at its lowest) leaves the state as it
is, bit by bit.
"""

from __future__ import annotations

from twinstage.models.fused.intrinsics import kernel
from twinstage.models.fused.vectors import LANES, divide, exp2, fma, larger, load, multiply, store, subtract

_VECTOR = 4 * LANES


@kernel
def fold_tile(state: int, tile: int, head_dim: int) -> None:
    """Fold one row, laid out as vectors: m, l (equal lanes), then o."""
    before, here = load(state), load(tile)
    top = larger(before, here)
    keep, join = exp2(subtract(before, top)), exp2(subtract(here, top))
    store(state, top)
    for offset in range(_VECTOR, 2 * _VECTOR + 4 * head_dim, _VECTOR):
        store(state + offset, fma(load(state + offset), keep, multiply(load(tile + offset), join)))


@kernel
def write_row(state: int, out: int, head_dim: int) -> None:
    """What the row attends to: o / l."""
    total = load(state + _VECTOR)
    for offset in range(0, 4 * head_dim, _VECTOR):
        store(out + offset, divide(load(state + 2 * _VECTOR + offset), total))
