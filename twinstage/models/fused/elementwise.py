"""What happens between the linears, each a pass over some rows. A row's result depends on nothing but the row."""

from __future__ import annotations

import math

import numpy as np

from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.intrinsics import exp, kernel, load_f32, load_i8, load_i32, reducing_kernel, store_f32
from twinstage.models.fused.tiles import PANEL

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)


@reducing_kernel
def sum_of_squares(values, size):  # type: ignore[no-untyped-def]
    """Of `size` float32; the compiler fixes the order of the additions, the same for every row."""
    total = _ZERO
    for index in range(size):
        value = load_f32(values, index)
        total += value * value
    return total


@kernel
def rms_norm_row(values, weight, size, epsilon, result):  # type: ignore[no-untyped-def]
    """`result = weight * values / sqrt(mean(values^2) + epsilon)`; may be in place."""
    factor = _ONE / np.float32(math.sqrt(sum_of_squares(values, size) / np.float32(size) + epsilon))
    for index in range(size):
        store_f32(result, index, load_f32(values, index) * factor * load_f32(weight, index))


@kernel
def embed_rows(token_ids, table, scale, size, hidden, stride, first, end):  # type: ignore[no-untyped-def]
    """Write the embedding of each token (int32 `[rows]`) to `hidden` `[rows, stride]`.

    The table lies in panels, as it is the weight of the last linear too in many models; `scale` 0 means that it is
    float32, else it is int8 with scales.
    """
    groups = (size + GROUP - 1) // GROUP
    for row in range(first, end):
        token = np.int64(load_i32(token_ids, row))
        panel = token // PANEL
        column = token % PANEL
        for k in range(size):
            place = (panel * size + k) * PANEL + column
            if scale == 0:
                value = load_f32(table, place)
            else:
                place_of_scale = (panel * groups + k // GROUP) * PANEL + column
                value = np.float32(load_i8(table, place)) * load_f32(scale, place_of_scale)
            store_f32(hidden, row * stride + k, value)


@kernel
def rms_norm_rows(hidden, stride, size, weight, epsilon, result, first, end):  # type: ignore[no-untyped-def]
    """Normalize rows of `hidden` `[rows, stride]` into `result` `[rows, size]`."""
    for row in range(first, end):
        rms_norm_row(hidden + row * stride * 4, weight, size, epsilon, result + row * size * 4)


@kernel
def swiglu_rows(gate_up, stride, size, result, first, end):  # type: ignore[no-untyped-def]
    """`silu(gate) * up` of rows `[gate (size) | up (size) | padding]` into `result` `[rows, size]`."""
    for row in range(first, end):
        gates = gate_up + row * stride * 4
        ups = gates + size * 4
        results = result + row * size * 4
        for index in range(size):
            gate = load_f32(gates, index)
            store_f32(results, index, gate / (_ONE + exp(-gate)) * load_f32(ups, index))


@kernel
def add_bias(values, bias, size):  # type: ignore[no-untyped-def]
    """`values += bias`, both float32 `[size]`."""
    for index in range(size):
        store_f32(values, index, load_f32(values, index) + load_f32(bias, index))


@kernel
def rotate_head(head, head_dim, cosines, sines):  # type: ignore[no-untyped-def]
    """Rotary position: dimension i turns with i + head_dim / 2, by the angle of which cosine and sine are given."""
    half = head_dim // 2
    for index in range(half):
        low = load_f32(head, index)
        high = load_f32(head, half + index)
        cosine = load_f32(cosines, index)
        sine = load_f32(sines, index)
        store_f32(head, index, low * cosine - high * sine)
        store_f32(head, half + index, high * cosine + low * sine)
