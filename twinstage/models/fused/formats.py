"""How weights are kept, and which way a precision is kept on this machine. Free of Numba.

fp32      float32 panels
int8      int8 panels, a scale for each 64 weights of an output; computed in float32
affine8   8-bit panels, scale and minimum for each 32; computed with integer dot products, inputs in 8 bits too
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.models.fused import affine
from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.packing import Floats, pack_panels, padded_panels, quantize
from twinstage.models.fused.target import target


class WeightFormat(StrEnum):
    """See the module."""

    FP32 = "fp32"
    INT8 = "int8"
    AFFINE8 = "affine8"


def format_of(precision: str, config: Mapping[str, Any]) -> WeightFormat:
    """The format of "fp32" or "int8" for a model with this config.json; int8 is affine8 where the processor can."""
    if precision == "fp32":
        return WeightFormat.FP32
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    inputs = (int(config["hidden_size"]), int(config["intermediate_size"]), heads * head_dim)
    fits = all(size % affine.GROUP == 0 for size in inputs)
    return WeightFormat.AFFINE8 if target().integer_dot and fits else WeightFormat.INT8


def kv_dtype_of(precision: str) -> str:
    """The number format in which keys and values are kept unless another is asked for."""
    if precision == "fp32":
        return "float32"
    return "bfloat16" if target().bfloat16_dot else "float16"


def has_bfloat16_dot(weight_format: WeightFormat, kv_dtype: str) -> bool:
    """Whether attention multiplies bfloat16 numbers: where that is fast, and precision was given up for speed."""
    return target().bfloat16_dot and kv_dtype == "bfloat16" and weight_format is not WeightFormat.FP32


def pack_linear(weight: Floats, weight_format: WeightFormat) -> Iterator[tuple[str, NDArray[Any]]]:
    """What the kernels read of a weight `[outputs, k]`: ("", weights) and, save for fp32, ("_SCALE", scales)."""
    match weight_format:
        case WeightFormat.FP32:
            yield "", pack_panels(weight)
        case WeightFormat.INT8:
            quantized, scale = quantize(weight)
            yield "", pack_panels(quantized)
            yield "_SCALE", pack_panels(scale)
        case WeightFormat.AFFINE8:
            packed = affine.pack_affine(weight, panel=target().panel)
            yield "", packed.stream
            yield "_SCALE", np.array([packed.unit], np.float32)


def linear_bytes(outputs: int, inputs: int, weight_format: WeightFormat) -> dict[str, int]:
    """Suffixes and sizes of what `pack_linear` makes of a weight `[outputs, inputs]`."""
    columns = padded_panels(outputs) * target().panel
    match weight_format:
        case WeightFormat.FP32:
            return {"": 4 * columns * inputs}
        case WeightFormat.INT8:
            return {"": columns * inputs, "_SCALE": 4 * columns * -(-inputs // GROUP)}
        case WeightFormat.AFFINE8:
            panels = padded_panels(outputs)
            return {"": panels * (inputs // affine.GROUP) * affine.group_bytes(target().panel), "_SCALE": 4}


def linear_scratch_bytes(max_k: int) -> int:
    """Scratch memory of one thread that is enough for the linears of every format."""
    expanded_panel = max_k * target().panel * 4
    quantized_rows = 128 * (max_k + 128 + max_k // affine.GROUP * 8)
    return max(expanded_panel, quantized_rows)
