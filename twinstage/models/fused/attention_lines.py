"""Where the keys of some positions lie: block tables turned into addresses."""

from __future__ import annotations

from typing import Any

from twinstage.models.fused import attention_work as w
from twinstage.models.fused.attention_work import AttentionShape, ScratchPlan
from twinstage.models.fused.intrinsics import kernel, load_i32, load_i64, store_i64
from twinstage.models.fused.vectors import LANES


def build_lines(shape: AttentionShape) -> Any:
    """The kernel `find_lines(work, layer, sequence, kv_head, first, count, scratch)`.

    Writes the addresses of the keys of positions `first .. first + count - 1` to the scratch's `lines`, followed by
    `2 * LANES` times the last one, so that whole vectors of lines can be read and prefetched.
    """
    line_bytes = shape.head_dim * shape.value_bytes
    lines_at = ScratchPlan(shape).lines

    @kernel
    def find_lines(work: int, layer: int, sequence: int, kv_head: int, first: int, count: int, scratch: int) -> None:
        lines = scratch + lines_at
        block_size: int = load_i64(work, w.BLOCK_SIZE)
        block_bytes: int = load_i64(work, w.BLOCK_BYTES)
        base = load_i64(work, w.KV) + layer * load_i64(work, w.LAYER_BYTES) + kv_head * load_i64(work, w.HEAD_BYTES)
        table = load_i64(work, w.TABLES) + 4 * sequence * load_i64(work, w.TABLE_STRIDE)
        block, place = first // block_size, first % block_size
        address = base + load_i32(table, block) * block_bytes + place * line_bytes
        for index in range(count):
            store_i64(lines, index, address)
            place += 1
            address += line_bytes
            if place == block_size and index + 1 < count:
                block, place = block + 1, 0
                address = base + load_i32(table, block) * block_bytes
        for index in range(count, count + 2 * LANES):
            store_i64(lines, index, load_i64(lines, count - 1))

    return find_lines
