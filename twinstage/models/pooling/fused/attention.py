"""Attention of every token to all tokens of its own sequence, on queries, keys and values as a linear left them.

An item is a group of query rows of one head. Lanes are query rows, so only queries and results are transposed; keys
and values are read where they lie. The scores of a group are kept whole: `[keys][GROUP]` in the thread's scratch.
"""

from __future__ import annotations

import numpy as np

from twinstage.models.fused.intrinsics import kernel, load_i64, store_i64
from twinstage.models.fused.panels import make_gather_transposed, make_product, make_scatter_transposed
from twinstage.models.fused.vectors import (
    LANES,
    add,
    divide,
    exp2,
    larger,
    load,
    multiply,
    splat,
    store,
    subtract,
)
from twinstage.models.pooling.fused.attention_room import GROUP, LINES_BYTES, TILE_ROWS, VECTORS

_VECTOR = 4 * LANES  # bytes
_ROW = 4 * GROUP  # bytes of one value of each row of a group
_LOWEST = np.float32(-3.0e38)

_gather = make_gather_transposed(dtype="float32")
_scatter = make_scatter_transposed()
_products = tuple(make_product(rows=TILE_ROWS, vectors=vectors) for vectors in range(1, VECTORS + 1))
_product_1, _product_2, _product_3 = _products


@kernel
def _product(vectors, a, a_row, a_step, b, c, count):  # type: ignore[no-untyped-def]
    if vectors == 1:
        _product_1(a, a_row, a_step, b, _ROW, c, _ROW, count)
    elif vectors == 2:
        _product_2(a, a_row, a_step, b, _ROW, c, _ROW, count)
    else:
        _product_3(a, a_row, a_step, b, _ROW, c, _ROW, count)


@kernel
def _softmax(scores, count):  # type: ignore[no-untyped-def]
    """Scores of one vector of rows to weights that are not yet divided by their sum, which it returns."""
    top = splat(_LOWEST)
    for key in range(count):
        top = larger(top, load(scores + key * _ROW))
    total = splat(np.float32(0.0))
    for key in range(count):
        weight = exp2(subtract(load(scores + key * _ROW), top))
        store(scores + key * _ROW, weight)
        total = add(total, weight)
    return total


@kernel
def _attend_group(query, row_bytes, keys, values, count, length, head_dim, scale, result, result_row, scratch):  # type: ignore[no-untyped-def]
    """`count` query rows at `query`, `row_bytes` apart as keys and values are, which are `length`."""
    lines, queries = scratch, scratch + LINES_BYTES
    sums = queries + head_dim * _ROW
    scores = sums + head_dim * _ROW
    vectors = (count + LANES - 1) // LANES
    for lane in range(vectors * LANES):  # lanes without a row repeat the last one
        store_i64(lines, lane, query + min(lane, count - 1) * row_bytes)
    factor = splat(np.float32(scale))
    for lane in range(0, vectors * LANES, LANES):
        for dimension in range(0, head_dim, LANES):
            _gather(lines + 8 * lane, 4 * dimension, queries + dimension * _ROW + 4 * lane, _ROW)
        for dimension in range(head_dim):
            place = queries + dimension * _ROW + 4 * lane
            store(place, multiply(load(place), factor))
    for key in range(0, length, TILE_ROWS):
        _product(vectors, keys + key * row_bytes, row_bytes, 4, queries, scores + key * _ROW, head_dim)
    for vector in range(vectors):  # the first row of queries is not needed any more
        store(queries + vector * _VECTOR, _softmax(scores + vector * _VECTOR, length))
    for dimension in range(0, head_dim, TILE_ROWS):
        _product(vectors, values + 4 * dimension, 4, row_bytes, scores, sums + dimension * _ROW, length)
    for lane in range(vectors * LANES):  # lanes without a row write where nobody reads
        store_i64(lines, lane, result + lane * result_row if lane < count else scores)
    for lane in range(0, vectors * LANES, LANES):
        total = load(queries + 4 * lane)
        for dimension in range(head_dim):
            place = sums + dimension * _ROW + 4 * lane
            store(place, divide(load(place), total))
        for dimension in range(0, head_dim, LANES):
            _scatter(sums + dimension * _ROW + 4 * lane, _ROW, lines + 8 * lane, 4 * dimension)


@kernel
def count_items(starts, first, end, num_heads):  # type: ignore[no-untyped-def]
    """Items of the sequences `first .. end - 1`."""
    items = 0
    for sequence in range(first, end):
        length = load_i64(starts, sequence + 1) - load_i64(starts, sequence)
        items += (length + GROUP - 1) // GROUP * num_heads
    return items


@kernel
def attend(  # type: ignore[no-untyped-def]
    qkv, attended, starts, first, end, num_heads, head_dim, scale, scratch, first_item, end_item
):
    """Items `first_item .. end_item - 1` of sequences `first .. end - 1`, whose first row is row 0 of both buffers.

    `qkv` is float32 `[rows, 3, heads, head_dim]`, `attended` `[rows, heads, head_dim]`.
    """
    head_bytes = 4 * head_dim
    result_row = num_heads * head_bytes
    row_bytes = 3 * result_row
    item = 0
    for sequence in range(first, end):
        row = load_i64(starts, sequence) - load_i64(starts, first)
        length = load_i64(starts, sequence + 1) - load_i64(starts, sequence)
        groups = (length + GROUP - 1) // GROUP
        for head in range(num_heads):
            for group in range(groups):
                if first_item <= item < end_item:
                    keys = qkv + row * row_bytes + result_row + head * head_bytes
                    own = row + group * GROUP
                    _attend_group(
                        qkv + own * row_bytes + head * head_bytes, row_bytes, keys, keys + result_row,
                        min(GROUP, length - group * GROUP), length, head_dim, scale,
                        attended + own * result_row + head * head_bytes, result_row, scratch,
                    )  # fmt: skip
                item += 1
