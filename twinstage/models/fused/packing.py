"""Weights in the order in which the tiles read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.models.fused.fields import GROUP
from twinstage.models.fused.target import target

Floats = NDArray[np.float32]


def padded_panels(num_outputs: int) -> int:
    """Panels that hold `num_outputs` columns."""
    return -(-num_outputs // target().panel)


def pack_panels(weight: NDArray[Any]) -> NDArray[Any]:
    """`[outputs, k]` to `[panels, k, PANEL]`, with zeros for the columns that fill the last panel."""
    outputs, k = weight.shape
    panels = padded_panels(outputs)
    padded = np.zeros((panels * target().panel, k), weight.dtype)
    padded[:outputs] = weight
    return np.ascontiguousarray(padded.reshape(panels, target().panel, k).transpose(0, 2, 1))


def quantize(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Symmetric int8 with one scale for each GROUP weights of an output: `[outputs, k]` and `[outputs, groups]`."""
    outputs, k = weight.shape
    groups = -(-k // GROUP)
    padded = np.zeros((outputs, groups * GROUP), np.float32)
    padded[:, :k] = weight
    grouped = padded.reshape(outputs, groups, GROUP)
    scale = np.abs(grouped).max(axis=2) / np.float32(127)
    divisor = np.where(scale == 0, np.float32(1), scale)
    quantized = np.rint(grouped / divisor[:, :, None]).astype(np.int8)
    return quantized.reshape(outputs, -1)[:, :k], scale
