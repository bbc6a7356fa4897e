"""A batch through all layers, in one call, by all threads at once.

Every thread runs `step`. It takes parts, some whole sequences each, and computes them alone until none is left. What is
too little to give every thread a part is shared by all of them at last, and a barrier separates each phase from those
that need its results. Both are the same sums in the same order.
"""

from __future__ import annotations

from typing import Any

from twinstage.models.fused.fields import SEMAPHORE_BYTES, SyncPlace
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.intrinsics import (
    kernel,
    load_acquire,
    load_f32,
    load_i64,
    semaphore_post,
    semaphore_wait,
)
from twinstage.models.fused.linear_vnni import linear_vnni
from twinstage.models.fused.sync import barrier
from twinstage.models.fused.tiles import PANEL
from twinstage.models.fused.vectors import take
from twinstage.models.pooling.fused.attention import attend, count_items
from twinstage.models.pooling.fused.elementwise import (
    add_and_norm_rows,
    add_row,
    embed_row,
    gelu_row,
    layer_norm_row,
)
from twinstage.models.pooling.fused.fields import EncoderField, EncoderLayerField
from twinstage.models.pooling.fused.linear import linear_of_part

_LAYER_BYTES = len(EncoderLayerField) * 8
_LINEARS = {WeightFormat.FP32: linear_of_part, WeightFormat.AFFINE8: linear_vnni}


@kernel
def _float_field(table, field):  # type: ignore[no-untyped-def]
    return load_f32(table, field * 2)


@kernel
def _embed(table, row, hidden, first, end):  # type: ignore[no-untyped-def]
    """Embeddings of rows `first .. end - 1` from row `row` of the batch on."""
    size, epsilon = load_i64(table, EncoderField.HIDDEN_SIZE), _float_field(table, EncoderField.EPSILON)
    token = load_i64(table, EncoderField.WORDS), load_i64(table, EncoderField.TOKEN_IDS)
    position = load_i64(table, EncoderField.POSITIONS), load_i64(table, EncoderField.POSITION_IDS)
    kind = load_i64(table, EncoderField.TYPES), load_i64(table, EncoderField.TYPE_IDS)
    norm, bias = load_i64(table, EncoderField.NORM), load_i64(table, EncoderField.NORM_BIAS)
    for index in range(first, end):
        values = hidden + index * size * 4
        embed_row(row + index, token, position, kind, size, values)
        layer_norm_row(values, norm, bias, size, epsilon)


def _make_attention(linear: Any) -> Any:
    @kernel
    def attention(table, layer, part, hidden, rows, work_row, scratch, thread, num_threads):  # type: ignore[no-untyped-def]
        """The first half of a layer; `part` has the first sequence and the one behind the last."""
        sync = load_i64(table, EncoderField.SYNC)
        size, epsilon = load_i64(table, EncoderField.HIDDEN_SIZE), _float_field(table, EncoderField.EPSILON)
        num_heads = load_i64(table, EncoderField.NUM_HEADS)
        first, end = rows * thread // num_threads, rows * (thread + 1) // num_threads
        qkv = load_i64(table, EncoderField.QKV) + work_row * 3 * size * 4
        attended = load_i64(table, EncoderField.ATTENDED) + work_row * size * 4
        linear(
            hidden, size, rows, load_i64(layer, EncoderLayerField.QKV), load_i64(layer, EncoderLayerField.QKV_SCALE),
            size, 3 * size // PANEL, qkv, 3 * size, 0, scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)
        for row in range(first, end):
            add_row(qkv + row * 3 * size * 4, load_i64(layer, EncoderLayerField.QKV_BIAS), 3 * size)
        barrier(sync, num_threads)
        starts = load_i64(table, EncoderField.STARTS)
        items = count_items(starts, part[0], part[1], num_heads)
        attend(
            qkv, attended, starts, part[0], part[1], num_heads, load_i64(table, EncoderField.HEAD_DIM),
            _float_field(table, EncoderField.ATTENTION_SCALE), scratch,
            items * thread // num_threads, items * (thread + 1) // num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)
        linear(
            attended, size, rows, load_i64(layer, EncoderLayerField.OUTPUT),
            load_i64(layer, EncoderLayerField.OUTPUT_SCALE), size, size // PANEL, hidden, size, 1,
            scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)
        add_and_norm_rows(
            hidden, load_i64(layer, EncoderLayerField.OUTPUT_BIAS), load_i64(layer, EncoderLayerField.OUTPUT_NORM),
            load_i64(layer, EncoderLayerField.OUTPUT_NORM_BIAS), size, epsilon, first, end,
        )  # fmt: skip
        barrier(sync, num_threads)

    return attention


def _make_feed_forward(linear: Any) -> Any:
    @kernel
    def feed_forward(table, layer, hidden, rows, work_row, scratch, thread, num_threads):  # type: ignore[no-untyped-def]
        """The second half of a layer."""
        sync = load_i64(table, EncoderField.SYNC)
        size, epsilon = load_i64(table, EncoderField.HIDDEN_SIZE), _float_field(table, EncoderField.EPSILON)
        inner_size = load_i64(table, EncoderField.INTERMEDIATE_SIZE)
        first, end = rows * thread // num_threads, rows * (thread + 1) // num_threads
        inner = load_i64(table, EncoderField.INNER) + work_row * inner_size * 4
        linear(
            hidden, size, rows, load_i64(layer, EncoderLayerField.UP), load_i64(layer, EncoderLayerField.UP_SCALE),
            size, inner_size // PANEL, inner, inner_size, 0, scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)
        for row in range(first, end):
            gelu_row(inner + row * inner_size * 4, load_i64(layer, EncoderLayerField.UP_BIAS), inner_size)
        barrier(sync, num_threads)
        linear(
            inner, inner_size, rows, load_i64(layer, EncoderLayerField.DOWN),
            load_i64(layer, EncoderLayerField.DOWN_SCALE), inner_size, size // PANEL, hidden, size, 1,
            scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)
        add_and_norm_rows(
            hidden, load_i64(layer, EncoderLayerField.DOWN_BIAS), load_i64(layer, EncoderLayerField.DOWN_NORM),
            load_i64(layer, EncoderLayerField.DOWN_NORM_BIAS), size, epsilon, first, end,
        )  # fmt: skip
        barrier(sync, num_threads)

    return feed_forward


def _make_step(linear: Any) -> Any:
    attention, feed_forward = _make_attention(linear), _make_feed_forward(linear)

    @kernel
    def compute(table, part, work_row, scratch, thread, num_threads):  # type: ignore[no-untyped-def]
        """All layers of one part, with buffers from `work_row` on, as thread `thread` of `num_threads`."""
        starts = load_i64(table, EncoderField.STARTS)
        row = load_i64(starts, part[0])
        rows = load_i64(starts, part[1]) - row
        hidden = load_i64(table, EncoderField.HIDDEN) + row * load_i64(table, EncoderField.HIDDEN_SIZE) * 4
        _embed(table, row, hidden, rows * thread // num_threads, rows * (thread + 1) // num_threads)
        barrier(load_i64(table, EncoderField.SYNC), num_threads)
        for index in range(load_i64(table, EncoderField.NUM_LAYERS)):
            layer = load_i64(table, EncoderField.LAYERS) + index * _LAYER_BYTES
            attention(table, layer, part, hidden, rows, work_row, scratch, thread, num_threads)
            feed_forward(table, layer, hidden, rows, work_row, scratch, thread, num_threads)

    @kernel
    def step(table, thread):  # type: ignore[no-untyped-def]
        """This thread's part of a step."""
        num_threads = load_i64(table, EncoderField.NUM_THREADS)
        scratch = load_i64(table, EncoderField.SCRATCH) + thread * load_i64(table, EncoderField.SCRATCH_BYTES)
        # Read before the last barrier of what threads compute alone: behind it, the table may be that of the next step.
        parts, num_parts = load_i64(table, EncoderField.PARTS), load_i64(table, EncoderField.NUM_PARTS)
        has_shared = load_i64(table, EncoderField.HAS_SHARED)
        work_row = load_i64(table, EncoderField.PART_ROWS) * thread
        next_part = load_i64(table, EncoderField.NEXT_PART)
        index = take(next_part, 1)
        while index < num_parts:
            compute(table, (load_i64(parts, index), load_i64(parts, index + 1)), work_row, scratch, 0, 1)
            index = take(next_part, 1)
        barrier(load_i64(table, EncoderField.SYNC), num_threads)
        if has_shared != 0:
            part = load_i64(parts, num_parts), load_i64(parts, num_parts + 1)
            compute(table, part, 0, scratch, thread, num_threads)

    return step


def make_entry_point(weight_format: WeightFormat) -> Any:
    """The one function that Python calls, `enter(table, thread)`; as that of `twinstage.models.fused.step`.

    Thread 0 computes a step with the help of the members, which are the other threads: each enters once and stays,
    asleep between steps, until STOP.
    """
    step = _make_step(_LINEARS[weight_format])

    @kernel
    def enter(table, thread):  # type: ignore[no-untyped-def]
        sync = load_i64(table, EncoderField.SYNC)
        if thread == 0:
            for member in range(1, load_i64(table, EncoderField.NUM_THREADS)):
                semaphore_post(sync + SyncPlace.SEMAPHORES + member * SEMAPHORE_BYTES)
        while True:
            if thread != 0:
                while semaphore_wait(sync + SyncPlace.SEMAPHORES + thread * SEMAPHORE_BYTES) != 0:
                    pass
                if load_acquire(sync + SyncPlace.STOP) != 0:
                    return
            step(table, thread)
            if thread == 0:
                return

    return enter
