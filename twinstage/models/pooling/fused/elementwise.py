"""What happens between the linears, each a pass over some rows. A row's result depends on nothing but the row."""

from __future__ import annotations

import math

import numpy as np

from twinstage.models.fused.intrinsics import kernel, load_f32, load_i32, reducing_kernel, store_f32
from twinstage.models.fused.vectors import (
    LANES,
    add,
    divide,
    exp2,
    fma,
    larger,
    load,
    multiply,
    splat,
    store,
    subtract,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_VECTOR = 4 * LANES  # bytes
_HALF_LOG2_E = 0.5 * math.log2(math.e)

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: with t = 1 / (1 + P z),
# erf(z) = 1 - (A1 t + ... + A5 t^5) e^(-z^2) within 1.5e-7 for z >= 0.
_P_OVER_ROOT_2 = 0.3275911 / math.sqrt(2)
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@reducing_kernel
def _sum(values, size):  # type: ignore[no-untyped-def]
    total = _ZERO
    for index in range(size):
        total += load_f32(values, index)
    return total


@reducing_kernel
def _sum_of_squares_about(values, mean, size):  # type: ignore[no-untyped-def]
    total = _ZERO
    for index in range(size):
        difference = load_f32(values, index) - mean
        total += difference * difference
    return total


@kernel
def layer_norm_row(values, weight, bias, size, epsilon):  # type: ignore[no-untyped-def]
    """`weight * (values - mean) / sqrt(variance + epsilon) + bias`, in place."""
    mean = _sum(values, size) / np.float32(size)
    variance = _sum_of_squares_about(values, mean, size) / np.float32(size)
    factor = _ONE / np.float32(math.sqrt(variance + epsilon))
    for index in range(size):
        scaled = (load_f32(values, index) - mean) * factor
        store_f32(values, index, scaled * load_f32(weight, index) + load_f32(bias, index))


@kernel
def add_and_norm_rows(rows, added, weight, bias, size, epsilon, first, end):  # type: ignore[no-untyped-def]
    """Add the bias of a linear layer to float32 `[rows, size]`, then normalize."""
    for row in range(first, end):
        values = rows + row * size * 4
        add_row(values, added, size)
        layer_norm_row(values, weight, bias, size, epsilon)


@kernel
def add_row(values, added, size):  # type: ignore[no-untyped-def]
    """`values += added`, both float32 `[size]`, a multiple of the lanes."""
    for place in range(0, size * 4, _VECTOR):
        store(values + place, add(load(values + place), load(added + place)))


@kernel
def gelu_row(values, added, size):  # type: ignore[no-untyped-def]
    """`gelu(values + added)` in place, with the error function: x / 2 * (1 + erf(x / sqrt(2))).

    Written as max(x, 0) - |x| / 2 * (1 - erf(|x| / sqrt(2))), where nothing cancels.
    """
    zero, half, one = splat(_ZERO), splat(np.float32(0.5)), splat(_ONE)
    for place in range(0, size * 4, _VECTOR):
        x = add(load(values + place), load(added + place))
        magnitude = larger(x, subtract(zero, x))
        t = divide(one, fma(magnitude, splat(np.float32(_P_OVER_ROOT_2)), one))
        sums = fma(t, splat(np.float32(_A[4])), splat(np.float32(_A[3])))
        sums = fma(t, sums, splat(np.float32(_A[2])))
        sums = fma(t, sums, splat(np.float32(_A[1])))
        sums = fma(t, sums, splat(np.float32(_A[0])))
        tail = exp2(multiply(multiply(x, x), splat(np.float32(-_HALF_LOG2_E))))
        rest = multiply(multiply(t, sums), tail)  # 1 - erf
        store(values + place, subtract(larger(x, zero), multiply(multiply(magnitude, half), rest)))


@kernel
def embed_row(row, token, position, kind, size, result):  # type: ignore[no-untyped-def]
    """The sum of three embeddings of row `row`; each argument is the address of a table and of its int32 ids."""
    words = token[0] + np.int64(load_i32(token[1], row)) * size * 4
    positions = position[0] + np.int64(load_i32(position[1], row)) * size * 4
    types = kind[0] + np.int64(load_i32(kind[1], row)) * size * 4
    for place in range(0, size * 4, _VECTOR):
        store(result + place, add(add(load(words + place), load(types + place)), load(positions + place)))
