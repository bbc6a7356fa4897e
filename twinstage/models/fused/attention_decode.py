"""Attention of chunks of one or a few tokens: memory-bound, so each key and value is loaded once for all query rows.

Keys are transposed in registers, `2 * LANES` of them at a time, so that lanes are keys; for the weighted values lanes
are dimensions. Of bfloat16 numbers, pairs take the place of single ones (`panels_bfloat16.py`). A context may be split
between threads: each tile leaves a partial result, and who finishes the last part folds them in their order, as one
thread alone would have done.
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused import attention_work as w
from twinstage.models.fused.attention_fold import fold_tile, write_row
from twinstage.models.fused.attention_lines import build_lines
from twinstage.models.fused.attention_work import TILE, AttentionShape, ScratchPlan
from twinstage.models.fused.bfloat16 import store_upper, weight
from twinstage.models.fused.intrinsics import kernel, load_i64, store_i64
from twinstage.models.fused.panels import make_gather_transposed, make_product, make_weighted_sum
from twinstage.models.fused.panels_bfloat16 import make_gather_pairs_transposed, make_weighted_sum_of_pairs
from twinstage.models.fused.target import target
from twinstage.models.fused.vectors import (
    LANES,
    counting,
    exp2,
    highest,
    larger,
    load,
    masked,
    multiply,
    prefetch,
    splat,
    store,
    store_bf16,
    subtract,
    take,
)

_KEYS = 2 * LANES  # transposed at a time
_VECTOR = 4 * LANES  # bytes
_PREFETCHED = 256  # bytes of the next keys and values: the hardware follows a run, but does not find the next block's
LOWEST = -1e30  # stands for no score at all; finite, so that differences are


def build_decode(shape: AttentionShape) -> Any:
    """The kernel `decode(item, work, layer, query, query_row, attended, scale, window, scratch)`.

    Computes one item of kind `WHOLE` or a part of a split context. Addresses in bytes; `query_row` is the bytes from a
    token's queries to the next one's, `attended` has rows of all heads; `scale` is for powers of two.
    """
    scores = _build_scores(shape)
    softmax = _build_softmax(shape)
    weigh = _build_weigh(shape)
    load_queries = _build_load_queries(shape)
    find_lines = build_lines(shape)
    plan = ScratchPlan(shape)
    head_dim, rows_per_token, padded = shape.head_dim, shape.rows_per_token, shape.padded_rows
    token_bytes = 4 * shape.num_heads * head_dim
    row_bytes = 2 * _VECTOR + 4 * head_dim
    partial_bytes = shape.partial_bytes
    decode_queries, decode_tile, decode_state = plan.decode_queries, plan.decode_tile, plan.decode_state

    @kernel
    def fold(state: int, tile: int, rows: int) -> None:
        for row in range(rows):
            fold_tile(state + row * row_bytes, tile + row * row_bytes, head_dim)

    @kernel
    def start(state: int, rows: int) -> None:
        for row in range(rows):
            store(state + row * row_bytes, splat(LOWEST))
            for index in range(1, 2 + head_dim // LANES):
                store(state + row * row_bytes + index * _VECTOR, splat(0.0))

    @kernel
    def write(state: int, attended: int, tokens: int) -> None:
        for token in range(tokens):
            for head in range(rows_per_token):
                write_row(
                    state + (token * padded + head) * row_bytes,
                    attended + token * token_bytes + head * 4 * head_dim,
                    head_dim,
                )

    @kernel
    def fold_partials(item: int, work: int, state: int, rows: int, first: int, end: int) -> None:
        """Fold all tiles of a split context, from the first that is seen."""
        partials = load_i64(work, w.PARTIALS) + load_i64(item, w.PARTIAL) * partial_bytes
        start(state, rows)
        for tile in range(first, end):
            fold(state, partials + tile * partial_bytes, rows)

    @kernel
    def decode(
        item: int,
        work: int,
        layer: int,
        query: int,
        query_row: int,
        attended: int,
        scale: float,
        window: int,
        scratch: int,
    ) -> None:
        sequence: int = load_i64(item, w.SEQUENCE)
        kv_head: int = load_i64(item, w.KV_HEAD)
        first_token = load_i64(load_i64(work, w.STARTS), sequence)
        tokens = load_i64(load_i64(work, w.STARTS), sequence + 1) - first_token
        context = load_i64(load_i64(work, w.CONTEXTS), sequence)
        rows, values_offset = tokens * padded, load_i64(work, w.VALUES_OFFSET)
        queries, state, partial = scratch + decode_queries, scratch + decode_state, load_i64(item, w.PARTIAL)
        heads = kv_head * rows_per_token * 4 * head_dim
        load_queries(query + first_token * query_row + heads, query_row, tokens, scale, queries)
        seen_from = max(0, context - tokens + 1 - window) if window > 0 else 0
        first_tile, end_tile = seen_from // TILE, (context + TILE - 1) // TILE
        if partial == w.WHOLE:
            start(state, rows)
        for tile in range(max(load_i64(item, w.FIRST_TILE), first_tile), load_i64(item, w.END_TILE)):
            result = scratch + decode_tile
            if partial != w.WHOLE:
                result = load_i64(work, w.PARTIALS) + (partial + tile) * partial_bytes
            count = min(TILE, context - tile * TILE)
            find_lines(work, layer, sequence, kv_head, tile * TILE, count, scratch)
            scores(scratch, tokens, count, values_offset)
            softmax(scratch, result, tokens, context - tokens + 1 - tile * TILE, count, window)
            weigh(scratch, result, rows, count, values_offset)
            if partial == w.WHOLE:
                fold(state, result, rows)
        if partial != w.WHOLE:
            pending = load_i64(work, w.PENDING) + 16 * load_i64(item, w.PAIR)
            if take(pending, -1) != 1:
                return
            store_i64(pending, 0, load_i64(pending, 1))  # ready for the next layer
            fold_partials(item, work, state, rows, first_tile, end_tile)
        write(state, attended + first_token * token_bytes + heads, tokens)

    return decode


def _build_load_queries(shape: AttentionShape) -> Any:
    """Copy the queries of a KV head's rows to scratch, scaled; rows that only fill a register tile are zero."""
    head_dim, rows_per_token, padded = shape.head_dim, shape.rows_per_token, shape.padded_rows
    row_bytes, put, put_bytes = 4 * head_dim, store, 4
    if shape.bfloat16_dot:
        put, put_bytes = store_bf16, 2

    @kernel
    def load_queries(source: int, source_row: int, tokens: int, scale: float, out: int) -> None:
        factor = splat(scale)
        for token in range(tokens):
            for head in range(padded):
                line = out + (token * padded + head) * head_dim * put_bytes
                own = source + token * source_row + head * row_bytes
                for dimension in range(0, head_dim, LANES):
                    if head < rows_per_token:
                        put(line + dimension * put_bytes, multiply(load(own + 4 * dimension), factor))
                    else:
                        put(line + dimension * put_bytes, splat(0.0))

    return load_queries


def _build_scores(shape: AttentionShape) -> Any:
    """Scores `[row][TILE]` of all query rows with the keys of a tile, rounded up to a multiple of `_KEYS`."""
    product = make_product(rows=shape.decode_panel, vectors=2, pairs=shape.bfloat16_dot)
    together = 2 if shape.bfloat16_dot else 1  # numbers that a product takes at once
    transpose_keys = _build_transpose_keys(shape)
    plan = ScratchPlan(shape)
    lines_at, keys_at, queries_at, scores_at = plan.lines, plan.decode_keys, plan.decode_queries, plan.decode_scores
    depth, padded, panel = shape.head_dim // together, shape.padded_rows, shape.decode_panel

    @kernel
    def scores(scratch: int, tokens: int, count: int, values_offset: int) -> None:
        lines, keys = scratch + lines_at, scratch + keys_at
        for key in range(0, count, _KEYS):
            for part in range(2):
                own = lines + 8 * (key + part * LANES)
                for ahead in range(0, _PREFETCHED, 64):
                    prefetch(load_i64(own, LANES) + ahead)
                    prefetch(load_i64(own, LANES) + values_offset + ahead)
                transpose_keys(own, keys + part * _VECTOR)
            for row in range(0, tokens * padded, panel):
                product(
                    scratch + queries_at + row * 4 * depth,
                    4 * depth,
                    4,
                    keys,
                    2 * _VECTOR,
                    scratch + scores_at + 4 * (row * TILE + key),
                    4 * TILE,
                    depth,
                )

    return scores


def _build_transpose_keys(shape: AttentionShape) -> Any:
    """The kernel `transpose_keys(lines, out)` for `LANES` keys: float32 numbers, or pairs of bfloat16, by dimension."""
    head_dim, value_bytes = shape.head_dim, shape.value_bytes
    gather = make_gather_transposed(dtype=shape.dtype)

    @kernel
    def transpose_keys(lines: int, out: int) -> None:
        for dimension in range(0, head_dim, LANES):
            gather(lines, dimension * value_bytes, out + dimension * 2 * _VECTOR, 2 * _VECTOR)

    if not shape.bfloat16_dot:
        return transpose_keys
    gather_whole = make_gather_pairs_transposed(pairs=LANES)
    gather_half = make_gather_pairs_transposed(pairs=LANES // 2)
    whole = head_dim // (2 * LANES) * 2 * LANES  # dimensions

    @kernel
    def transpose_pairs(lines: int, out: int) -> None:
        for dimension in range(0, whole, 2 * LANES):
            gather_whole(lines, dimension * 2, out + dimension * _VECTOR, 2 * _VECTOR)
        if whole < head_dim:
            gather_half(lines, whole * 2, out + whole * _VECTOR, 2 * _VECTOR)

    return transpose_pairs


def _build_softmax(shape: AttentionShape) -> Any:
    """Turn scores into weights relative to the highest of the tile, which goes to the row's result.

    Weights are float32, or bfloat16 at the beginning of the row's line.
    """
    plan = ScratchPlan(shape)
    power, put, put_bytes = (weight, store_upper, 2) if shape.bfloat16_dot else (exp2, store, 4)
    scores_at, padded = plan.decode_scores, shape.padded_rows
    row_bytes = 2 * _VECTOR + 4 * shape.head_dim

    @kernel
    def softmax(scratch: int, result: int, tokens: int, first_end: int, count: int, window: int) -> None:
        """`first_end`: keys of the tile, from its first, that the first token sees; the next sees one more."""
        for row in range(tokens * padded):
            line = scratch + scores_at + 4 * TILE * row
            end = first_end + row // padded
            low = splat(float(end - window) if window > 0 else 0.0)
            high = splat(float(min(end, count)))
            top = splat(LOWEST)
            for key in range(0, count, LANES):
                score = masked(load(line + 4 * key), counting(float(key)), low, high)
                store(line + 4 * key, score)
                top = larger(top, score)
            top = splat(highest(top))
            store(result + row * row_bytes, top)
            for key in range(0, count, LANES):
                put(line + put_bytes * key, power(subtract(load(line + 4 * key), top)))

    return softmax


def _build_weigh(shape: AttentionShape) -> Any:
    """Sums of the weights and weighted sums of the values of a tile, to the rows' results."""
    plan = ScratchPlan(shape)
    head_dim, panel = shape.head_dim, shape.decode_panel
    vectors = _vectors_at_once(head_dim // LANES, panel)
    weighted_sum = make_weighted_sum(rows=panel, vectors=vectors, dtype=shape.dtype)
    together = 1
    if shape.bfloat16_dot:
        weighted_sum, together = make_weighted_sum_of_pairs(rows=panel, vectors=vectors), 2
    lines_at, scores_at = plan.lines, plan.decode_scores
    row_bytes, value_bytes = 2 * _VECTOR + 4 * head_dim, shape.value_bytes
    columns = vectors * LANES

    @kernel
    def weigh(scratch: int, result: int, rows: int, count: int, values_offset: int) -> None:
        for row in range(0, rows, panel):
            for column in range(0, head_dim, columns):
                own = result + row * row_bytes
                weighted_sum(
                    scratch + scores_at + 4 * TILE * row,
                    4 * TILE,
                    scratch + lines_at,
                    values_offset + column * value_bytes,
                    own + 2 * _VECTOR + 4 * column,
                    row_bytes,
                    own + _VECTOR,
                    row_bytes,
                    (count + together - 1) // together,
                )

    return weigh


def _vectors_at_once(vectors: int, rows: int) -> int:
    """The largest divisor of `vectors` with which a register tile of `rows` rows fits the registers."""
    accumulators = 24 if target().lanes == 16 else 12
    return max(size for size in range(1, vectors + 1) if vectors % size == 0 and size * rows <= max(accumulators, rows))
