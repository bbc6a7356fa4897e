"""Attention of longer chunks: bound by multiplications, so lanes are query rows, and only queries need transposing.

An item has a few groups of `GROUP` rows; a row is a token's head, those of a KV head lie together. Tile by tile of
keys, which all groups share unpacked: scores, softmax of the tile, weighted values, fold. Tiles of which no row of a
group sees anything are skipped. What depends on the numbers that are multiplied is in `attention_prefill_float32.py`
and `attention_prefill_bfloat16.py`.
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused import attention_prefill_bfloat16, attention_prefill_float32
from twinstage.models.fused import attention_work as w
from twinstage.models.fused.attention_decode import LOWEST
from twinstage.models.fused.attention_lines import build_lines
from twinstage.models.fused.attention_work import GROUP, TILE, AttentionShape, ScratchPlan
from twinstage.models.fused.intrinsics import kernel, load_f32, load_i64, store_f32, store_i64
from twinstage.models.fused.panels import make_gather_transposed, make_product, make_scatter_transposed
from twinstage.models.fused.target import target
from twinstage.models.fused.vectors import (
    LANES,
    divide,
    exp2,
    fma,
    larger,
    load,
    masked,
    multiply,
    splat,
    store,
    subtract,
)

_VECTOR = 4 * LANES  # bytes
_ROW = 4 * GROUP  # bytes of one value of each row of a group
_TOP, _SUM, _FIRST, _END = 0, _ROW, 2 * _ROW, 3 * _ROW  # in the state of a group
_STATE = 4 * _ROW
_PANEL_ROWS = 8 if target().lanes == 16 else 4
_PANEL_VECTORS = 3
_PANEL_COLUMNS = _PANEL_VECTORS * LANES


def build_prefill(shape: AttentionShape) -> Any:
    """The kernel `prefill` for items of kind `PREFILL`, with the arguments of the one of `build_decode`."""
    numbers = attention_prefill_bfloat16 if shape.bfloat16_dot else attention_prefill_float32
    begin_group, end_group = _build_begin(shape, numbers.build_scale_queries(shape)), _build_end(shape)
    compute_tile, unpack, find_lines = (
        _build_tile(shape, numbers.weigh_scores),
        numbers.build_unpack(shape),
        build_lines(shape),
    )
    plan, rows_per_token = ScratchPlan(shape), shape.rows_per_token
    states = plan.states

    @kernel
    def prefill(
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
        first_row, num_rows = load_i64(item, w.FIRST_ROW), load_i64(item, w.NUM_ROWS)
        first_token = load_i64(load_i64(work, w.STARTS), sequence)
        tokens = load_i64(load_i64(work, w.STARTS), sequence + 1) - first_token
        start = load_i64(load_i64(work, w.CONTEXTS), sequence) - tokens  # position of the chunk's first token
        groups = (num_rows + GROUP - 1) // GROUP
        for group in range(groups):
            row = first_row + group * GROUP
            count = min(GROUP, num_rows - group * GROUP)
            begin_group(group, query, query_row, first_token, start, kv_head, row, count, scale, window, scratch)
        seen_from = max(0, start + first_row // rows_per_token + 1 - window) if window > 0 else 0
        end = start + (first_row + num_rows - 1) // rows_per_token + 1
        for tile in range(seen_from // TILE, (end + TILE - 1) // TILE):
            count = min(TILE, end - tile * TILE)
            find_lines(work, layer, sequence, kv_head, tile * TILE, count, scratch)
            unpack(scratch, count, load_i64(work, w.VALUES_OFFSET))
            for group in range(groups):
                state = scratch + states + group * _STATE
                last = min(GROUP, num_rows - group * GROUP) - 1
                group_end = int(load_f32(state + _END, last)) - tile * TILE
                if group_end > 0 and load_f32(state + _FIRST, 0) < tile * TILE + count:
                    compute_tile(group, tile * TILE, min(group_end, count), last, scratch)
        for group in range(groups):
            row = first_row + group * GROUP
            end_group(group, attended, first_token, kv_head, row, min(GROUP, num_rows - group * GROUP), scratch)

    return prefill


def _build_begin(shape: AttentionShape, scale_queries: Any) -> Any:
    """Transpose and scale the queries of a group; positions that its rows see; an empty state."""
    gather = make_gather_transposed(dtype="float32")
    plan, head_dim, rows_per_token = ScratchPlan(shape), shape.head_dim, shape.rows_per_token
    row_lines, queries_at, sums_at, states = plan.row_lines, plan.queries, plan.sums, plan.states

    @kernel
    def begin_group(
        group: int,
        query: int,
        query_row: int,
        first_token: int,
        start: int,
        kv_head: int,
        row: int,
        count: int,
        scale: float,
        window: int,
        scratch: int,
    ) -> None:
        queries, state = scratch + queries_at + group * head_dim * _ROW, scratch + states + group * _STATE
        for lane in range(GROUP):
            own = row + min(lane, count - 1)  # lanes without a row repeat the last one
            token, head = own // rows_per_token, own % rows_per_token
            place = (first_token + token) * query_row + (kv_head * rows_per_token + head) * 4 * head_dim
            store_i64(scratch + row_lines, lane, query + place)
            end = start + token + 1
            store_f32(state + _END, lane, float(end))
            store_f32(state + _FIRST, lane, float(max(0, end - window)) if window > 0 else 0.0)
        for lane in range(0, GROUP, LANES):
            for dimension in range(0, head_dim, LANES):
                gather(scratch + row_lines + 8 * lane, 4 * dimension, queries + dimension * _ROW + 4 * lane, _ROW)
            store(state + _TOP + 4 * lane, splat(LOWEST))
            store(state + _SUM + 4 * lane, splat(0.0))
        scale_queries(queries, scale)
        sums = scratch + sums_at + group * head_dim * _ROW
        for place in range(0, head_dim * _ROW, _VECTOR):
            store(sums + place, splat(0.0))

    return begin_group


def _build_tile(shape: AttentionShape, weigh_scores: Any) -> Any:
    """One tile of keys for one group."""
    together = 2 if shape.bfloat16_dot else 1  # numbers that a product takes at once
    product = make_product(rows=_PANEL_ROWS, vectors=_PANEL_VECTORS, pairs=shape.bfloat16_dot)
    softmax = _build_softmax(weigh_scores)
    depth, key_bytes = shape.head_dim // together, 4 * shape.head_dim // together
    plan, head_dim = ScratchPlan(shape), shape.head_dim
    queries_at, sums_at, states = plan.queries, plan.sums, plan.states
    keys_at, values_at, scores_at, panel_at = plan.keys, plan.values, plan.scores, plan.panel

    @kernel
    def compute_tile(group: int, position: int, count: int, last: int, scratch: int) -> None:
        """`position` of the first key; `count` keys that some row sees; `last` row of the group."""
        queries, sums = scratch + queries_at + group * head_dim * _ROW, scratch + sums_at + group * head_dim * _ROW
        scores, panel, state = scratch + scores_at, scratch + panel_at, scratch + states + group * _STATE
        for column in range(0, _ROW, 4 * _PANEL_COLUMNS):
            for key in range(0, count, _PANEL_ROWS):
                product(
                    scratch + keys_at + key * key_bytes,
                    key_bytes,
                    4,
                    queries + column,
                    _ROW,
                    scores + key * _ROW + column,
                    _ROW,
                    depth,
                )
        # Rows see the more keys, and begin the later, the further back they are.
        plain = load_f32(state + _END, 0) >= position + count and load_f32(state + _FIRST, last) <= position
        for column in range(0, _ROW, _VECTOR):
            softmax(scores + column, state + column, panel + column, position, count, plain)
        for column in range(0, _ROW, 4 * _PANEL_COLUMNS):
            for dimension in range(0, head_dim, _PANEL_ROWS):
                product(
                    scratch + values_at + 4 * dimension,
                    4,
                    4 * head_dim,
                    scores + column,
                    _ROW,
                    panel + 2 * _ROW + column,
                    _ROW,
                    (count + together - 1) // together,
                )
                for place in range(column, column + 4 * _PANEL_COLUMNS, _VECTOR):
                    keep, join = load(panel + place), load(panel + _ROW + place)
                    for row in range(_PANEL_ROWS):
                        total = sums + (dimension + row) * _ROW + place
                        here = multiply(load(panel + (2 + row) * _ROW + place), join)
                        store(total, fma(load(total), keep, here))

    return compute_tile


def _build_softmax(weigh_scores: Any) -> Any:
    """Scores of one vector of rows to weights; the factors that fold the tile into the state go to the panel."""

    @kernel
    def softmax(scores: int, state: int, panel: int, position: int, count: int, plain: bool) -> None:
        top = splat(LOWEST)
        if plain:
            for key in range(count):
                top = larger(top, load(scores + key * _ROW))
        else:
            first, end = load(state + _FIRST), load(state + _END)
            for key in range(count):
                score = masked(load(scores + key * _ROW), splat(float(position + key)), first, end)
                store(scores + key * _ROW, score)
                top = larger(top, score)
        total = weigh_scores(scores, top, count)
        before = load(state + _TOP)
        highest = larger(before, top)
        keep, join = exp2(subtract(before, highest)), exp2(subtract(top, highest))
        store(state + _TOP, highest)
        store(state + _SUM, fma(load(state + _SUM), keep, multiply(total, join)))
        store(panel, keep)
        store(panel + _ROW, join)

    return softmax


def _build_end(shape: AttentionShape) -> Any:
    """Divide by the sums of weights and write the rows of a group back in their order."""
    scatter = make_scatter_transposed()
    plan, head_dim, rows_per_token = ScratchPlan(shape), shape.head_dim, shape.rows_per_token
    row_lines, sums_at, states, spare = plan.row_lines, plan.sums, plan.states, plan.panel
    token_bytes = 4 * shape.num_heads * head_dim

    @kernel
    def end_group(
        group: int, attended: int, first_token: int, kv_head: int, row: int, count: int, scratch: int
    ) -> None:
        sums, state = scratch + sums_at + group * head_dim * _ROW, scratch + states + group * _STATE
        for lane in range(GROUP):
            token, head = (row + lane) // rows_per_token, (row + lane) % rows_per_token
            line = attended + (first_token + token) * token_bytes + (kv_head * rows_per_token + head) * 4 * head_dim
            store_i64(scratch + row_lines, lane, line if lane < count else scratch + spare)
        for lane in range(0, GROUP, LANES):
            total = load(state + _SUM + 4 * lane)
            for dimension in range(head_dim):
                place = sums + dimension * _ROW + 4 * lane
                store(place, divide(load(place), total))
            for dimension in range(0, head_dim, LANES):
                scatter(sums + dimension * _ROW + 4 * lane, _ROW, scratch + row_lines + 8 * lane, 4 * dimension)

    return end_group
