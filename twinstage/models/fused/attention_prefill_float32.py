"""What prefill attention does with numbers that it multiplies as float32, whatever keys and values are kept in."""

from __future__ import annotations

from typing import Any

from twinstage.models.fused.attention_work import GROUP, AttentionShape, ScratchPlan
from twinstage.models.fused.intrinsics import kernel, load_i64
from twinstage.models.fused.vectors import LANES, LOAD, add, exp2, load, multiply, splat, store, subtract

_VECTOR = 4 * LANES  # bytes
_ROW = 4 * GROUP  # bytes of one value of each row of a group


def build_scale_queries(shape: AttentionShape) -> Any:
    """The kernel `scale_queries(queries, scale)` for float32 `[head_dim][GROUP]`, in place."""
    size = shape.head_dim * _ROW

    @kernel
    def scale_queries(queries: int, scale: float) -> None:
        factor = splat(scale)
        for place in range(0, size, _VECTOR):
            store(queries + place, multiply(load(queries + place), factor))

    return scale_queries


def build_unpack(shape: AttentionShape) -> Any:
    """Keys and values of a tile as float32 `[count][head_dim]` in scratch."""
    load_kv = LOAD[shape.dtype]
    plan, head_dim, value_bytes = ScratchPlan(shape), shape.head_dim, shape.value_bytes
    lines_at, keys_at, values_at = plan.lines, plan.keys, plan.values

    @kernel
    def unpack(scratch: int, count: int, values_offset: int) -> None:
        for index in range(count):
            line: int = load_i64(scratch + lines_at, index)
            place = scratch + index * 4 * head_dim
            for dimension in range(0, head_dim, LANES):
                store(place + keys_at + 4 * dimension, load_kv(line + value_bytes * dimension))
                store(place + values_at + 4 * dimension, load_kv(line + values_offset + value_bytes * dimension))

    return unpack


@kernel
def weigh_scores(scores: int, top: Any, count: int) -> Any:
    """Turn the scores of a vector of rows into weights `2^(score - top)`, in place; returns their sums."""
    total = splat(0.0)
    for key in range(count):
        weight = exp2(subtract(load(scores + key * _ROW), top))
        store(scores + key * _ROW, weight)
        total = add(total, weight)
    return total
