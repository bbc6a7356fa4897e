"""Attention over paged keys and values for one step of several sequences, without copying them together.

    plan(work)          once a step, by one thread: the step's items
    attention(...)      once a layer, by every thread: takes items until none is left

A barrier belongs after each. **What a row gets depends on its own sequence alone**, bit by bit: not on the batch, on
how its prompt was cut into chunks, on the kernel that computes it, on threads or on the width of vectors. For that all
kernels do the same operations in the same order: scores sum over dimensions, sums over keys run within tiles of `TILE`
keys that begin at multiples of it, and tiles are folded one after another (`attention_fold.py`). With `bfloat16_dot`,
queries and weights are rounded to bfloat16, as keys and values are, and a term of a sum is two products
(`bfloat16.py`); vectors then have one width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from twinstage.models.fused import attention_work as w
from twinstage.models.fused.attention_decode import build_decode
from twinstage.models.fused.attention_prefill import build_prefill
from twinstage.models.fused.attention_work import GROUP, MAX_GROUPS, SPLIT_BELOW, TILE, AttentionShape
from twinstage.models.fused.intrinsics import kernel, load_i64, store_i64
from twinstage.models.fused.vectors import take

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """`plan(work)` and `attention(work, layer, query, query_row, attended, scale, window, thread)`.

    All arguments are int64 but the float `scale`. `work` is the address of an `AttentionWork`; `query` that of float32
    queries, heads one after another, `query_row` bytes from token to token; `attended` gets `[tokens][heads][head_dim]`
    float32. A token sees the last `window` tokens, itself included; 0: all.
    """

    plan: Any
    attention: Any


def build_attention(shape: AttentionShape) -> AttentionKernels:
    """The kernels for models of this shape."""
    decode, prefill = build_decode(shape), build_prefill(shape)
    log2_e = LOG2_E

    @kernel
    def attention(
        work: int, layer: int, query: int, query_row: int, attended: int, scale: float, window: int, thread: int
    ) -> None:
        counter = load_i64(work, w.COUNTERS) + 8 * layer
        scratch = load_i64(work, w.SCRATCH) + thread * load_i64(work, w.SCRATCH_BYTES)
        num_items = load_i64(work, w.NUM_ITEMS)
        index = take(counter, 1)
        while index < num_items:
            item: int = load_i64(work, w.ITEMS) + 8 * w.ITEM * index
            if load_i64(item, w.PARTIAL) == w.PREFILL:
                prefill(item, work, layer, query, query_row, attended, scale * log2_e, window, scratch)
            else:
                decode(item, work, layer, query, query_row, attended, scale * log2_e, window, scratch)
            index = take(counter, 1)

    return AttentionKernels(plan=_build_plan(shape), attention=attention)


def _build_plan(shape: AttentionShape) -> Any:
    """Items, the expensive ones first: chunks by groups of rows from the last on, then contexts, split when few."""
    num_kv_heads, rows_per_token, max_decode_tokens = shape.num_kv_heads, shape.rows_per_token, shape.max_decode_tokens
    item_rows = GROUP * MAX_GROUPS

    @kernel
    def add_item(work: int, sequence: int, kv_head: int, row: int, rows: int, partial: int) -> int:
        index: int = load_i64(work, w.NUM_ITEMS)
        item: int = load_i64(work, w.ITEMS) + 8 * w.ITEM * index
        store_i64(item, w.SEQUENCE, sequence)
        store_i64(item, w.KV_HEAD, kv_head)
        store_i64(item, w.FIRST_ROW, row)
        store_i64(item, w.NUM_ROWS, rows)
        store_i64(item, w.PARTIAL, partial)
        store_i64(work, w.NUM_ITEMS, index + 1)
        return item

    @kernel
    def add_decode(work: int, sequence: int, kv_head: int, parts: int, pair: int, partial: int) -> None:
        context: int = load_i64(load_i64(work, w.CONTEXTS), sequence)
        tiles = (context + TILE - 1) // TILE
        parts = min(parts, tiles)
        pending = load_i64(work, w.PENDING) + 16 * pair
        if parts > 1:
            store_i64(pending, 0, parts)
            store_i64(pending, 1, parts)
        for part in range(parts):
            item = add_item(work, sequence, kv_head, 0, 0, partial if parts > 1 else w.WHOLE)
            store_i64(item, w.FIRST_TILE, tiles * part // parts)
            store_i64(item, w.END_TILE, tiles * (part + 1) // parts)
            store_i64(item, w.PAIR, pair)

    @kernel
    def plan(work: int) -> None:
        starts: int = load_i64(work, w.STARTS)
        contexts: int = load_i64(work, w.CONTEXTS)
        num_sequences, num_threads = load_i64(work, w.NUM_SEQUENCES), load_i64(work, w.NUM_THREADS)
        for layer in range(load_i64(work, w.NUM_LAYERS)):
            store_i64(load_i64(work, w.COUNTERS), layer, 0)
        store_i64(work, w.NUM_ITEMS, 0)
        pairs = 0
        for sequence in range(num_sequences):
            tokens = load_i64(starts, sequence + 1) - load_i64(starts, sequence)
            if tokens <= max_decode_tokens:
                pairs += num_kv_heads
                continue
            rows = tokens * rows_per_token
            for part in range((rows + item_rows - 1) // item_rows - 1, -1, -1):
                for kv_head in range(num_kv_heads):
                    row = part * item_rows
                    add_item(work, sequence, kv_head, row, min(item_rows, rows - row), w.PREFILL)
        few = SPLIT_BELOW * num_threads
        parts = 1 if pairs >= few or num_threads == 1 else (2 * few + pairs - 1) // max(1, pairs)
        pair, partial = 0, 0
        for sequence in range(num_sequences):
            if load_i64(starts, sequence + 1) - load_i64(starts, sequence) <= max_decode_tokens:
                for kv_head in range(num_kv_heads):
                    add_decode(work, sequence, kv_head, parts, pair, partial)
                    pair += 1
                    partial += (load_i64(contexts, sequence) + TILE - 1) // TILE

    return plan
