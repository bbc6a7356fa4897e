"""Sizes of attention's register tiles and of the scratch memory that they need. Free of Numba."""

from __future__ import annotations

from twinstage.models.fused.target import target

VECTORS = 3  # of query rows in a register tile
TILE_ROWS = 8 if target().lanes == 16 else 4  # keys or dimensions in a register tile: as many as registers hold
GROUP = VECTORS * target().lanes  # query rows of an item
LINES_BYTES = (8 * GROUP + 63) // 64 * 64  # addresses of a group's rows


def scratch_bytes(longest: int, head_dim: int) -> int:
    """Of one thread, for sequences of up to `longest` tokens: queries, results and scores of a group."""
    return LINES_BYTES + 4 * GROUP * (2 * head_dim + longest + TILE_ROWS)
