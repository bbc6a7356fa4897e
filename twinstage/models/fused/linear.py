"""y = x W^T for weights in panels, fp32 or int8, for any number of rows.

Few rows (decoding): the work is to read the weights once, so each panel meets all rows before the next. Many rows
(prefill): blocks of rows that stay in the second-level cache meet one panel after another, whose int8 weights are
expanded once per block. Both are the same sums in the same order (`tiles.py`).
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.intrinsics import external, kernel
from twinstage.models.fused.tiles import PANEL, TILE_ROWS, tile_panels

EXPAND_FROM_ROWS = 4 * TILE_ROWS + 1
_CACHED_BYTES = 384 * 1024  # of x, in the second-level cache beside one expanded panel

_tile_f32 = external("twinstage_tile_f32", 10)
_tile_int8 = external("twinstage_tile_i8", 10)
_expand_panel = external("twinstage_expand_panel", 4)
_ROWS_OF_FOUR_PANELS = max(rows for rows in range(1, TILE_ROWS + 1) if tile_panels(rows) == 4)
_ROWS_OF_TWO_PANELS = max(rows for rows in range(1, TILE_ROWS + 1) if tile_panels(rows) == 2)


def scratch_bytes(max_k: int) -> int:
    """Scratch memory of one thread: one expanded panel."""
    return max_k * PANEL * 4


@kernel
def _panels_together(rows, left):  # type: ignore[no-untyped-def]
    """Panels that the next tile computes, of `left` that there are."""
    if rows <= _ROWS_OF_FOUR_PANELS and left >= 4:
        return 4
    if rows <= _ROWS_OF_TWO_PANELS and left >= 2:
        return 2
    return 1


def _make_few_rows(tile: Any, weight_bytes: int) -> Any:
    @kernel
    def few_rows(x, x_stride, num_rows, weight, scale, k, first_panel, end_panel, y, y_stride, accumulate):  # type: ignore[no-untyped-def]
        """All rows with the panels `first_panel .. end_panel - 1`, a few panels at a time."""
        groups = (k + GROUP - 1) // GROUP
        num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
        most_rows = (num_rows + num_tiles - 1) // num_tiles
        panel = first_panel
        while panel < end_panel:
            panels = _panels_together(most_rows, end_panel - panel)
            row = 0
            for index in range(num_tiles):
                rows = (num_rows - row) // (num_tiles - index)
                tile(
                    rows,
                    panels,
                    x + row * x_stride * 4,
                    x_stride,
                    weight + panel * k * PANEL * weight_bytes,
                    scale + panel * groups * PANEL * 4,
                    k,
                    y + (row * y_stride + panel * PANEL) * 4,
                    y_stride,
                    accumulate,
                )
                row += rows
            panel += panels

    return few_rows


_few_rows_f32 = _make_few_rows(_tile_f32, 4)
_few_rows_int8 = _make_few_rows(_tile_int8, 1)


@kernel
def _block_rows(num_rows, k):  # type: ignore[no-untyped-def]
    """Rows of one block: about equal blocks of whole tiles that fit the cache."""
    fitting = max(TILE_ROWS, _CACHED_BYTES // (k * 4) // TILE_ROWS * TILE_ROWS)
    num_blocks = (num_rows + fitting - 1) // fitting
    even = (num_rows + num_blocks - 1) // num_blocks
    return (even + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def _make_linear(few_rows: Any, int8: bool) -> Any:
    @kernel
    def linear(  # type: ignore[no-untyped-def]
        x, x_stride, num_rows, weight, scale, k, num_panels, y, y_stride, accumulate, scratch, thread, num_threads
    ):
        """This thread's part of y = x W^T, or y += x W^T; addresses, and strides in elements.

        `x` is `[num_rows, k]`, `y` `[num_rows, num_panels * PANEL]`; `scratch` has `scratch_bytes(k)` bytes.
        """
        if num_rows < EXPAND_FROM_ROWS:
            first = num_panels * thread // num_threads
            end = num_panels * (thread + 1) // num_threads
            few_rows(x, x_stride, num_rows, weight, scale, k, first, end, y, y_stride, accumulate)
            return
        groups = (k + GROUP - 1) // GROUP
        block_rows = _block_rows(num_rows, k)
        num_items = (num_rows + block_rows - 1) // block_rows * num_panels
        for item in range(num_items * thread // num_threads, num_items * (thread + 1) // num_threads):
            row = item // num_panels * block_rows
            panel = item % num_panels
            rows = min(block_rows, num_rows - row)
            panel_weight = weight + panel * k * PANEL * 4
            if int8:
                panel_scale = scale + panel * groups * PANEL * 4
                _expand_panel(weight + panel * k * PANEL, panel_scale, k, scratch)
                panel_weight = scratch
            x_block = x + row * x_stride * 4
            y_block = y + (row * y_stride + panel * PANEL) * 4
            _few_rows_f32(x_block, x_stride, rows, panel_weight, 0, k, 0, 1, y_block, y_stride, accumulate)

    return linear


linear_f32 = _make_linear(_few_rows_f32, False)
linear_int8 = _make_linear(_few_rows_int8, True)
