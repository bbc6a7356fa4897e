"""What prefill attention does with numbers that it multiplies as pairs of bfloat16 (`bfloat16.py`).

Keys are kept as such; queries and weights are rounded. The pairs of queries and keys are neighbouring dimensions, those
of weights and values neighbouring keys, of which a tile has an even number: one of weight 0 fills it up.
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused.attention_work import GROUP, AttentionShape, ScratchPlan
from twinstage.models.fused.bfloat16 import ONES, copy_line, dot, join, pairs_of_lines, rounded, weight
from twinstage.models.fused.intrinsics import kernel, load_i64
from twinstage.models.fused.vectors import LANES, load, multiply, splat, store, subtract

_VECTOR = 4 * LANES  # bytes
_ROW = 4 * GROUP  # bytes of one value, or pair, of each row of a group


def build_scale_queries(shape: AttentionShape) -> Any:
    """The kernel `scale_queries(queries, scale)`: float32 `[head_dim][GROUP]` to pairs `[head_dim / 2][GROUP]`."""
    head_dim = shape.head_dim

    @kernel
    def scale_queries(queries: int, scale: float) -> None:
        factor = splat(scale)
        for dimension in range(0, head_dim, 2):
            for column in range(0, _ROW, _VECTOR):
                source = queries + dimension * _ROW + column
                first, second = multiply(load(source), factor), multiply(load(source + _ROW), factor)
                store(queries + dimension // 2 * _ROW + column, join(rounded(first), rounded(second)))

    return scale_queries


def build_unpack(shape: AttentionShape) -> Any:
    """Keys of a tile as they are, `[count][head_dim]`, and pairs of values, `[ceil(count / 2)][head_dim]`."""
    plan, head_dim = ScratchPlan(shape), shape.head_dim
    lines_at, keys_at, values_at = plan.lines, plan.keys, plan.values

    @kernel
    def unpack(scratch: int, count: int, values_offset: int) -> None:
        for index in range(0, count, 2):
            # There are lines beyond the last one, which repeat it.
            first, second = load_i64(scratch + lines_at, index), load_i64(scratch + lines_at, index + 1)
            place = scratch + index * 2 * head_dim
            for dimension in range(0, head_dim, LANES):
                keys = place + keys_at + 2 * dimension
                copy_line(first + 2 * dimension, keys)
                copy_line(second + 2 * dimension, keys + 2 * head_dim)
                values = values_offset + 2 * dimension
                store(place + values_at + 4 * dimension, pairs_of_lines(first + values, second + values))

    return unpack


@kernel
def weigh_scores(scores: int, top: Any, count: int) -> Any:
    """Turn the scores `[count]` of a vector of rows into pairs of weights `2^(score - top)`; returns their sums."""
    total = splat(0.0)
    for key in range(0, count - 1, 2):
        place = scores + key * _ROW
        pair = join(weight(subtract(load(place), top)), weight(subtract(load(place + _ROW), top)))
        store(scores + key // 2 * _ROW, pair)
        total = dot(total, pair, splat(ONES))
    if count % 2 == 1:
        pair = join(weight(subtract(load(scores + (count - 1) * _ROW), top)), splat(0.0))
        store(scores + count // 2 * _ROW, pair)
        total = dot(total, pair, splat(ONES))
    return total
