"""Rows of an embedding table that is packed as affine weights: models often use one matrix for both ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from twinstage.models.fused.affine import GROUP, group_bytes
from twinstage.models.fused.intrinsics import F32, I8, kernel, load_f32, load_i32, pointer, store_f32
from twinstage.models.fused.target import target

PANEL = target().panel
_GROUP_BYTES = group_bytes(PANEL)
_SCALES = GROUP * PANEL // 2  # float16 elements from the start of a group
_MINIMA = _SCALES + PANEL


def _load_u8(typing_context: Any, address: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.uitofp(builder.load(pointer(builder, arguments[0], I8, arguments[1])), F32)

    return types.float32(types.int64, types.int64), generate


def _load_f16(typing_context: Any, address: Any, index: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        return builder.fpext(builder.load(pointer(builder, arguments[0], ir.HalfType(), arguments[1])), F32)

    return types.float32(types.int64, types.int64), generate


_u8_as_f32: Any = intrinsic(_load_u8)
_f16_as_f32: Any = intrinsic(_load_f16)


@kernel
def embed_rows_affine(token_ids, table, scale, size, hidden, stride, first, end):  # type: ignore[no-untyped-def]
    """Write the embedding of each token (int32 `[rows]`) to rows `first .. end - 1` of `hidden` `[rows, stride]`.

    `table` is the stream of `pack_affine` and `scale` the address of its unit.
    """
    unit = np.float32(load_f32(scale, 0))
    for row in range(first, end):
        token = np.int64(load_i32(token_ids, row))
        column = token % PANEL
        for group in range(size // GROUP):
            address = table + (token // PANEL * (size // GROUP) + group) * _GROUP_BYTES
            step = _f16_as_f32(address, _SCALES + column)
            start = _f16_as_f32(address, _MINIMA + column)
            for k in range(GROUP):
                quantized = _u8_as_f32(address, k // 4 * 4 * PANEL + column * 4 + k % 4)
                store_f32(hidden, row * stride + group * GROUP + k, (quantized * step + start) * unit)
