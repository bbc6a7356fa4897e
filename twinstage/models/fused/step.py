"""One step of the model: all layers, in one call, by all threads at once.

Every thread runs `step` and does its part of each phase; a barrier separates a phase from those that need its results.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twinstage.models.fused import attention_work as w
from twinstage.models.fused.attention import build_attention
from twinstage.models.fused.attention_work import AttentionShape
from twinstage.models.fused.elementwise import (
    add_bias,
    embed_rows,
    rms_norm_row,
    rms_norm_rows,
    rotate_head,
    swiglu_rows,
)
from twinstage.models.fused.embed_affine import embed_rows_affine
from twinstage.models.fused.fields import SEMAPHORE_BYTES, LayerField, StepField, SyncPlace
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.intrinsics import (
    kernel,
    load_acquire,
    load_f32,
    load_i32,
    load_i64,
    semaphore_post,
    semaphore_wait,
)
from twinstage.models.fused.linear import linear_f32, linear_int8
from twinstage.models.fused.linear_vnni import linear_vnni
from twinstage.models.fused.sync import barrier
from twinstage.models.fused.tiles import PANEL
from twinstage.models.fused.vectors import LANES, STORE, load, store

_LAYER_BYTES = len(LayerField) * 8
_KERNELS = {  # linear, embedding
    WeightFormat.FP32: (linear_f32, embed_rows),
    WeightFormat.INT8: (linear_int8, embed_rows),
    WeightFormat.AFFINE8: (linear_vnni, embed_rows_affine),
}


@kernel
def _float_field(table, field):  # type: ignore[no-untyped-def]
    return load_f32(table, field * 2)


@kernel
def _place_of_key(table, row, layer, line_bytes):  # type: ignore[no-untyped-def]
    """Address of a row's key in KV head 0, where one head's key has `line_bytes`."""
    work = load_i64(table, StepField.ATTENTION)
    position = load_i64(load_i64(table, StepField.POSITIONS), row)
    sequence = load_i64(load_i64(table, StepField.SEQUENCES), row)
    block_size = load_i64(work, w.BLOCK_SIZE)
    entry = sequence * load_i64(work, w.TABLE_STRIDE) + position // block_size
    block = np.int64(load_i32(load_i64(work, w.TABLES), entry))
    in_block = layer * load_i64(work, w.LAYER_BYTES) + position % block_size * line_bytes
    return load_i64(work, w.KV) + block * load_i64(work, w.BLOCK_BYTES) + in_block


@kernel
def _finish_head(head, norm, head_dim, epsilon, cosines, sines):  # type: ignore[no-untyped-def]
    """Normalize a query or key head where the model does, then give it its position."""
    if norm != 0:
        rms_norm_row(head, norm, head_dim, epsilon, head)
    rotate_head(head, head_dim, cosines, sines)


def _make_position_and_store(shape: AttentionShape) -> Any:
    store_kv, line_bytes, value_bytes = STORE[shape.dtype], shape.head_dim * shape.value_bytes, shape.value_bytes

    @kernel
    def write_head(source, target, head_dim):  # type: ignore[no-untyped-def]
        for index in range(0, head_dim, LANES):
            store_kv(target + index * value_bytes, load(source + index * 4))

    @kernel
    def position_and_store(table, layer, index, first, end):  # type: ignore[no-untyped-def]
        """Finish queries and keys of some rows and write keys and values to their blocks."""
        head_dim = load_i64(table, StepField.HEAD_DIM)
        num_heads = load_i64(table, StepField.NUM_HEADS)
        num_kv_heads = load_i64(table, StepField.NUM_KV_HEADS)
        epsilon = _float_field(table, StepField.EPSILON)
        row_bytes = load_i64(table, StepField.QKV_PANELS) * PANEL * 4
        head_bytes = load_i64(load_i64(table, StepField.ATTENTION), w.HEAD_BYTES)
        bias = load_i64(layer, LayerField.QKV_BIAS)
        for row in range(first, end):
            head = load_i64(table, StepField.QKV) + row * row_bytes
            if bias != 0:
                add_bias(head, bias, (num_heads + 2 * num_kv_heads) * head_dim)
            angle = load_i64(load_i64(table, StepField.POSITIONS), row) * (head_dim // 2) * 4
            cosines = load_i64(table, StepField.COSINES) + angle
            sines = load_i64(table, StepField.SINES) + angle
            for _ in range(num_heads):
                _finish_head(head, load_i64(layer, LayerField.QUERY_NORM), head_dim, epsilon, cosines, sines)
                head += head_dim * 4
            place = _place_of_key(table, row, index, line_bytes)
            for kv_head in range(num_kv_heads):
                _finish_head(head, load_i64(layer, LayerField.KEY_NORM), head_dim, epsilon, cosines, sines)
                write_head(head, place + kv_head * head_bytes, head_dim)
                head += head_dim * 4
            for kv_head in range(num_kv_heads):
                write_head(head, place + (num_kv_heads + kv_head) * head_bytes, head_dim)
                head += head_dim * 4

    return position_and_store


def _make_write_kv(linear: Any, shape: AttentionShape) -> Any:
    position_and_store = _make_position_and_store(shape)

    @kernel
    def write_kv(table, index, first, end, scratch, thread):  # type: ignore[no-untyped-def]
        """The part of a layer that all rows need: queries, and keys and values in their blocks."""
        num_threads = load_i64(table, StepField.NUM_THREADS)
        sync = load_i64(table, StepField.SYNC)
        num_rows = load_i64(table, StepField.NUM_ROWS)
        layer = load_i64(table, StepField.LAYERS) + index * _LAYER_BYTES
        hidden = load_i64(table, StepField.HIDDEN)
        hidden_stride = load_i64(table, StepField.HIDDEN_STRIDE)
        hidden_size = load_i64(table, StepField.HIDDEN_SIZE)
        normed = load_i64(table, StepField.NORMED)

        norm, epsilon = load_i64(layer, LayerField.INPUT_NORM), _float_field(table, StepField.EPSILON)
        rms_norm_rows(hidden, hidden_stride, hidden_size, norm, epsilon, normed, first, end)
        barrier(sync, num_threads)

        qkv_panels = load_i64(table, StepField.QKV_PANELS)
        linear(
            normed, hidden_size, num_rows, load_i64(layer, LayerField.QKV), load_i64(layer, LayerField.QKV_SCALE),
            hidden_size, qkv_panels, load_i64(table, StepField.QKV), qkv_panels * PANEL, 0,
            scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)

        position_and_store(table, layer, index, first, end)
        barrier(sync, num_threads)

    return write_kv


@kernel
def _keep_sampled_rows(table):  # type: ignore[no-untyped-def]
    """Move hidden states and queries of the sampled rows to the front: row numbers increase, so none is overwritten."""
    hidden, hidden_bytes = load_i64(table, StepField.HIDDEN), load_i64(table, StepField.HIDDEN_STRIDE) * 4
    qkv, qkv_bytes = load_i64(table, StepField.QKV), load_i64(table, StepField.QKV_PANELS) * PANEL * 4
    query_bytes = load_i64(table, StepField.NUM_HEADS) * load_i64(table, StepField.HEAD_DIM) * 4
    for sample in range(load_i64(table, StepField.NUM_SAMPLED)):
        row = load_i64(load_i64(table, StepField.SAMPLED_ROWS), sample)
        for place in range(0, hidden_bytes, 4 * LANES):
            store(hidden + sample * hidden_bytes + place, load(hidden + row * hidden_bytes + place))
        for place in range(0, query_bytes, 4 * LANES):
            store(qkv + sample * qkv_bytes + place, load(qkv + row * qkv_bytes + place))


def _make_finish_layer(linear: Any, attention: Any) -> Any:
    @kernel
    def finish_layer(table, index, work, num_rows, scratch, thread):  # type: ignore[no-untyped-def]
        """The rest of a layer for the first `num_rows` rows, which are those of the table `work` of attention."""
        num_threads = load_i64(table, StepField.NUM_THREADS)
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        sync = load_i64(table, StepField.SYNC)
        layer = load_i64(table, StepField.LAYERS) + index * _LAYER_BYTES
        hidden = load_i64(table, StepField.HIDDEN)
        hidden_stride = load_i64(table, StepField.HIDDEN_STRIDE)
        hidden_size = load_i64(table, StepField.HIDDEN_SIZE)
        hidden_panels = load_i64(table, StepField.HIDDEN_PANELS)
        normed = load_i64(table, StepField.NORMED)
        query_size = load_i64(table, StepField.NUM_HEADS) * load_i64(table, StepField.HEAD_DIM)

        attention(
            work, index, load_i64(table, StepField.QKV), load_i64(table, StepField.QKV_PANELS) * PANEL * 4,
            load_i64(table, StepField.ATTENDED), _float_field(table, StepField.ATTENTION_SCALE),
            load_i64(layer, LayerField.WINDOW), thread,
        )  # fmt: skip
        barrier(sync, num_threads)

        attended = load_i64(table, StepField.ATTENDED)
        linear(
            attended, query_size, num_rows, load_i64(layer, LayerField.OUTPUT),
            load_i64(layer, LayerField.OUTPUT_SCALE),
            query_size, hidden_panels, hidden, hidden_stride, 1, scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)

        norm, epsilon = load_i64(layer, LayerField.POST_NORM), _float_field(table, StepField.EPSILON)
        rms_norm_rows(hidden, hidden_stride, hidden_size, norm, epsilon, normed, first, end)
        barrier(sync, num_threads)

        gate_up = load_i64(table, StepField.GATE_UP)
        gate_up_panels = load_i64(table, StepField.GATE_UP_PANELS)
        linear(
            normed, hidden_size, num_rows, load_i64(layer, LayerField.GATE_UP),
            load_i64(layer, LayerField.GATE_UP_SCALE), hidden_size, gate_up_panels, gate_up, gate_up_panels * PANEL, 0,
            scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)

        activated = load_i64(table, StepField.ACTIVATED)
        size = load_i64(table, StepField.INTERMEDIATE_SIZE)
        swiglu_rows(gate_up, gate_up_panels * PANEL, size, activated, first, end)
        barrier(sync, num_threads)

        linear(
            activated, size, num_rows, load_i64(layer, LayerField.DOWN), load_i64(layer, LayerField.DOWN_SCALE),
            size, hidden_panels, hidden, hidden_stride, 1, scratch, thread, num_threads,
        )  # fmt: skip
        barrier(sync, num_threads)

    return finish_layer


def _make_step(linear: Any, embed: Any, shape: AttentionShape) -> Any:
    kernels = build_attention(shape)
    plan = kernels.plan
    write_kv, finish_layer = _make_write_kv(linear, shape), _make_finish_layer(linear, kernels.attention)

    @kernel
    def step(table, thread):  # type: ignore[no-untyped-def]
        """This thread's part of a step: embedding, all layers, and the logits of the sampled rows."""
        num_threads = load_i64(table, StepField.NUM_THREADS)
        sync = load_i64(table, StepField.SYNC)
        scratch = load_i64(table, StepField.SCRATCH) + thread * load_i64(table, StepField.SCRATCH_BYTES)
        num_rows = load_i64(table, StepField.NUM_ROWS)
        hidden = load_i64(table, StepField.HIDDEN)
        hidden_size = load_i64(table, StepField.HIDDEN_SIZE)
        hidden_stride = load_i64(table, StepField.HIDDEN_STRIDE)
        first = num_rows * thread // num_threads
        end = num_rows * (thread + 1) // num_threads
        embed(
            load_i64(table, StepField.TOKEN_IDS), load_i64(table, StepField.EMBEDDING),
            load_i64(table, StepField.EMBEDDING_SCALE), hidden_size, hidden, hidden_stride, first, end,
        )  # fmt: skip
        work, num_layers = load_i64(table, StepField.ATTENTION), load_i64(table, StepField.NUM_LAYERS)
        num_sampled, work_of_sampled = load_i64(table, StepField.NUM_SAMPLED), load_i64(work, w.SAMPLED)
        if thread == 0:  # before the barriers of the first layer
            plan(work)
            if work_of_sampled != 0 and num_sampled > 0:
                plan(work_of_sampled)
        for index in range(num_layers):
            write_kv(table, index, first, end, scratch, thread)
            if index == num_layers - 1 and work_of_sampled != 0:
                if thread == 0:
                    _keep_sampled_rows(table)
                barrier(sync, num_threads)
                work, num_rows = work_of_sampled, num_sampled
            if num_rows > 0:
                finish_layer(table, index, work, num_rows, scratch, thread)

        normed = load_i64(table, StepField.NORMED)
        for sample in range(num_sampled * thread // num_threads, num_sampled * (thread + 1) // num_threads):
            rms_norm_row(  # either only sampled rows are left, or all rows are sampled
                hidden + sample * hidden_stride * 4, load_i64(table, StepField.FINAL_NORM), hidden_size,
                _float_field(table, StepField.EPSILON), normed + sample * hidden_size * 4,
            )  # fmt: skip
        barrier(sync, num_threads)
        if num_sampled > 0:
            panels = load_i64(table, StepField.VOCAB_PANELS)
            linear(
                normed, hidden_size, num_sampled, load_i64(table, StepField.LM_HEAD),
                load_i64(table, StepField.LM_HEAD_SCALE), hidden_size, panels, load_i64(table, StepField.LOGITS),
                panels * PANEL, 0, scratch, thread, num_threads,
            )  # fmt: skip
        barrier(sync, num_threads)

    return step


def make_entry_point(weight_format: WeightFormat, shape: AttentionShape) -> Any:
    """The one function that Python calls, `enter(table, thread)`.

    Thread 0 computes a step with the help of the members, which are the other threads: each enters once and stays,
    asleep between steps, until STOP.
    """
    step = _make_step(*_KERNELS[weight_format], shape)

    @kernel
    def enter(table, thread):  # type: ignore[no-untyped-def]
        sync = load_i64(table, StepField.SYNC)
        if thread == 0:
            for member in range(1, load_i64(table, StepField.NUM_THREADS)):
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
