"""y = x W^T with 8-bit integer dot products: affine weights (`affine.py`), activations quantized here, row by row.

Few rows (decoding): the threads share the panels, and each quantizes all rows for itself, which costs less than to wait
for one another. Many rows (prefill): the threads share the rows first. The sums are the same (`tiles_vnni.py`).
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused.affine import GROUP, group_bytes
from twinstage.models.fused.intrinsics import kernel, load_f32
from twinstage.models.fused.tiles_vnni import CACHE_LINE, PANEL, TILES, make_tile, quantize_row

_BLOCK_ROWS = 128  # quantized at a time: they stay in the second-level cache beside a panel
_ROWS_OF_A_PART = 48  # fewer rows than this for each thread, and threads share panels instead
_GROUP_BYTES = group_bytes(PANEL)
_LINE = 64  # bytes; rows begin one apart from multiples of a power of two, which would share their place in the cache


def scratch_bytes(max_k: int) -> int:
    """Scratch memory of one thread: a block of quantized rows and their scales."""
    return _BLOCK_ROWS * (_q_stride_python(max_k) + max_k // GROUP * 8)


def _q_stride_python(k: int) -> int:
    return (k + _LINE - 1) // _LINE * _LINE + _LINE


_q_stride = kernel(_q_stride_python)


def _make_rows_of(tile_rows: tuple[int, ...], *, prefetches: bool) -> Any:
    """A kernel that computes any number of rows of one panel with tiles of the given sizes, largest first."""
    rows_of_tile = tile_rows[0]
    tile = make_tile(rows_of_tile, prefetches=prefetches)
    rest = _make_rows_of(tile_rows[1:], prefetches=prefetches) if len(tile_rows) > 1 else None

    if rest is None:

        @kernel
        def smallest(q, q_stride, scales, scales_stride, rows, weight, groups, y, y_stride, accumulate, ahead, lines):  # type: ignore[no-untyped-def]
            for row in range(rows):
                tile(
                    q + row * q_stride,
                    q_stride,
                    scales + row * scales_stride,
                    scales_stride,
                    weight,
                    groups,
                    y + row * y_stride,
                    y_stride,
                    accumulate,
                    ahead,
                    lines,
                )
                ahead += lines * groups * CACHE_LINE

        return smallest

    @kernel
    def rows_of(q, q_stride, scales, scales_stride, rows, weight, groups, y, y_stride, accumulate, ahead, lines):  # type: ignore[no-untyped-def]
        row = 0
        while row + rows_of_tile <= rows:
            tile(
                q + row * q_stride,
                q_stride,
                scales + row * scales_stride,
                scales_stride,
                weight,
                groups,
                y + row * y_stride,
                y_stride,
                accumulate,
                ahead,
                lines,
            )
            row += rows_of_tile
            ahead += lines * groups * CACHE_LINE
            if ahead >= weight + 2 * groups * _GROUP_BYTES:
                lines = 0
        if row < rows:
            rest(
                q + row * q_stride,
                q_stride,
                scales + row * scales_stride,
                scales_stride,
                rows - row,
                weight,
                groups,
                y + row * y_stride,
                y_stride,
                accumulate,
                ahead,
                lines,
            )

    return rows_of


_rows_of_panel = _make_rows_of(TILES, prefetches=True)
_few_rows_of_panel = _make_rows_of(TILES, prefetches=False)


@kernel
def _block(x, x_stride, num_rows, weight, unit, k, first_panel, end_panel, y, y_stride, accumulate, scratch):  # type: ignore[no-untyped-def]
    """Quantize up to _BLOCK_ROWS rows into `scratch` and multiply them with panels `first_panel .. end_panel - 1`."""
    groups = k // GROUP
    q_stride = _q_stride(k)
    scales = scratch + _BLOCK_ROWS * q_stride
    for row in range(num_rows):
        quantize_row(x + row * x_stride * 4, scratch + row * q_stride, scales + row * groups * 8, groups, unit)
    if num_rows <= TILES[0]:  # faster than memory anyway, and the hardware follows the one run
        for panel in range(first_panel, end_panel):
            _few_rows_of_panel(
                scratch, q_stride, scales, groups * 8, num_rows, weight + panel * groups * _GROUP_BYTES, groups,
                y + panel * PANEL * 4, y_stride * 4, accumulate, 0, 0,
            )  # fmt: skip
        return
    # Every tile of a panel asks for its share of the next panel, which comes from memory while this one is computed.
    num_tiles = (num_rows + TILES[0] - 1) // TILES[0]
    share = (_GROUP_BYTES // CACHE_LINE + num_tiles - 1) // num_tiles
    for panel in range(first_panel, end_panel):
        own = weight + panel * groups * _GROUP_BYTES
        _rows_of_panel(
            scratch, q_stride, scales, groups * 8, num_rows, own, groups,
            y + panel * PANEL * 4, y_stride * 4, accumulate,
            own + groups * _GROUP_BYTES, share if panel + 1 < end_panel else 0,
        )  # fmt: skip


@kernel
def linear_vnni(  # type: ignore[no-untyped-def]
    x, x_stride, num_rows, weight, scale, k, num_panels, y, y_stride, accumulate, scratch, thread, num_threads
):
    """This thread's part of y = x W^T, or y += x W^T; addresses, and strides in elements.

    `x` is `[num_rows, k]`, k a multiple of GROUP, `y` `[num_rows, num_panels * PANEL]`; `weight` the stream of
    `pack_affine`, `scale` the address of its unit as float32; `scratch` has `scratch_bytes(k)` bytes.
    """
    row_parts = 1
    while num_threads % (row_parts * 2) == 0 and num_rows >= row_parts * 2 * _ROWS_OF_A_PART:
        row_parts *= 2
    panel_parts = num_threads // row_parts
    row_part, panel_part = thread % row_parts, thread // row_parts
    first_panel, end_panel = num_panels * panel_part // panel_parts, num_panels * (panel_part + 1) // panel_parts
    end_row = num_rows * (row_part + 1) // row_parts
    row = num_rows * row_part // row_parts
    while row < end_row:
        rows = min(_BLOCK_ROWS, end_row - row)
        _block(
            x + row * x_stride * 4,
            x_stride,
            rows,
            weight,
            load_f32(scale, 0),
            k,
            first_panel,
            end_panel,
            y + row * y_stride * 4,
            y_stride,
            accumulate,
            scratch,
        )
        row += rows
