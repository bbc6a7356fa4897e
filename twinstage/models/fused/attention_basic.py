"""Attention that walks the block table, one query row of one KV head after another; keys and values in float32."""

from __future__ import annotations

import numpy as np

from twinstage.models.fused.intrinsics import exp, kernel, load_f32, load_i32, load_i64, reducing_kernel, store_f32

_LOWEST = np.float32(-3e38)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def attention_scratch_bytes(*, max_context: int, head_dim: int) -> int:
    """Scratch memory of one thread: the scores of one row."""
    return (max_context + head_dim) * 4


@reducing_kernel
def _dot(a, b, size):  # type: ignore[no-untyped-def]
    total = _ZERO
    for index in range(size):
        total += load_f32(a, index) * load_f32(b, index)
    return total


@kernel
def _attend_head(  # type: ignore[no-untyped-def]
    query, attended, keys, block_stride, value_offset, block_size, table, first, end, head_dim, scale, scores
):
    """One query over the keys of positions `first .. end - 1`: softmax in two passes, then the weighted sum."""
    highest = _LOWEST
    for position in range(first, end):
        block = np.int64(load_i32(table, position // block_size))
        key = keys + (block * block_stride + position % block_size * head_dim) * 4
        score = _dot(query, key, head_dim) * scale
        highest = max(highest, score)
        store_f32(scores, position - first, score)
    total = _ZERO
    for index in range(end - first):
        weight = exp(load_f32(scores, index) - highest)
        total += weight
        store_f32(scores, index, weight)
    for index in range(head_dim):
        store_f32(attended, index, _ZERO)
    for position in range(first, end):
        block = np.int64(load_i32(table, position // block_size))
        value = keys + (block * block_stride + position % block_size * head_dim + value_offset) * 4
        weight = load_f32(scores, position - first)
        for index in range(head_dim):
            store_f32(attended, index, load_f32(attended, index) + weight * load_f32(value, index))
    for index in range(head_dim):
        store_f32(attended, index, load_f32(attended, index) / total)


@kernel
def attend(  # type: ignore[no-untyped-def]
    query,
    query_stride,
    attended,
    attended_stride,
    blocks,
    block_stride,
    layer_offset,
    block_size,
    block_tables,
    table_stride,
    sequence_of_row,
    position_of_row,
    num_rows,
    num_heads,
    num_kv_heads,
    head_dim,
    scale,
    window,
    scratch,
    thread,
    num_threads,
):
    """This thread's part of the attention of all rows.

    `query` is `[num_rows, num_heads, head_dim]` with its row stride, `attended` likewise; `blocks` are the KV blocks,
    of which this layer begins `layer_offset` elements after the start; `block_tables`
    int32 `[sequences, table_stride]`. A row at position p sees positions `0 .. p`, or the last `window` of them when
    that is not 0.
    """
    group = num_heads // num_kv_heads
    head_elements = block_size * head_dim
    for item in range(thread, num_rows * num_heads, num_threads):
        row = item // num_heads
        head = item % num_heads
        kv_head = head // group
        end = load_i64(position_of_row, row) + 1
        first = max(0, end - window) if window > 0 else 0
        _attend_head(
            query + (row * query_stride + head * head_dim) * 4,
            attended + (row * attended_stride + head * head_dim) * 4,
            blocks + (layer_offset + kv_head * head_elements) * 4,
            block_stride,
            num_kv_heads * head_elements,
            block_size,
            block_tables + load_i64(sequence_of_row, row) * table_stride * 4,
            first,
            end,
            head_dim,
            scale,
            scratch,
        )
