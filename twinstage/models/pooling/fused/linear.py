"""y = x W^T in float32 for the rows of a part, which stay in the second-level cache whatever k is."""

from __future__ import annotations

from twinstage.models.fused.intrinsics import external, kernel
from twinstage.models.fused.linear import linear_f32
from twinstage.models.fused.tiles import PANEL, TILE_ROWS
from twinstage.models.pooling.fused.fields import MOST_PART_ROWS

_tile = external("twinstage_tile_f32", 10)


@kernel
def linear_of_part(  # type: ignore[no-untyped-def]
    x, x_stride, num_rows, weight, scale, k, num_panels, y, y_stride, accumulate, scratch, thread, num_threads
):
    """As `twinstage.models.fused.linear.linear_f32`, but weights come from memory once, where that takes the longest.

    Each panel meets all rows before the next.
    """
    if num_rows > MOST_PART_ROWS:
        linear_f32(
            x, x_stride, num_rows, weight, scale, k, num_panels, y, y_stride, accumulate, scratch, thread, num_threads
        )
        return
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for panel in range(num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads):
        row = 0
        for index in range(num_tiles):
            rows = (num_rows - row) // (num_tiles - index)
            _tile(
                rows, 1, x + row * x_stride * 4, x_stride, weight + panel * k * PANEL * 4, scale, k,
                y + (row * y_stride + panel * PANEL) * 4, y_stride, accumulate,
            )  # fmt: skip
            row += rows
