"""Weights as unsigned bytes with a scale and a minimum per 32 along k: w = scale * q + minimum.

Of two roundings the nearer one is taken for each group: 255 steps from its smallest to its largest weight, or 254 steps
even about zero. So weights that come from a format with 32 weights to a scale (Q4_1 and Q8_0 of GGUF, say) are kept as
they are, up to the rounding of scale and minimum to float16.

In memory, one stream in the order in which a tile reads it:

    [num_panels][k / 32] x ( uint8 [8][PANEL][4] | float16 scale [PANEL] | float16 minimum [PANEL] )

where the innermost four bytes are consecutive in k. Scales and minima are divided by `unit`, a power of two that
brings those of the whole matrix into the range of float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]

GROUP = 32  # weights of one output, and activations of one row, that share a scale
_LARGEST = 2.0**15  # of scales and minima in units, below the largest float16
_CHUNK_OUTPUTS = 4096  # quantized at a time, to bound the memory for a large vocabulary


@dataclass(frozen=True, slots=True)
class AffineWeights:
    """One matrix `[outputs, k]` in bytes; `outputs` is padded with zeros to whole panels."""

    stream: NDArray[np.uint8]  # [num_panels, k / GROUP, panel_bytes(panel) of one group]
    unit: float


def group_bytes(panel: int) -> int:
    """Bytes of one group of one panel: quantized weights, scales and minima."""
    return GROUP * panel + 2 * 2 * panel


def pack_affine(weight: Floats, *, panel: int) -> AffineWeights:
    """Quantize and order `weight` `[outputs, k]`; k must be a multiple of GROUP.

    Raises ValueError for another k, and for weights that are not finite.
    """
    outputs, k = weight.shape
    if k % GROUP:
        raise ValueError(f"k must be a multiple of {GROUP}, not {k}")
    largest = float(np.abs(weight).max(initial=0.0))
    if not np.isfinite(largest):
        raise ValueError("weights must be finite")
    unit = 2.0 ** float(np.ceil(np.log2(largest / _LARGEST))) if largest > 0 else 1.0
    num_panels, groups = -(-outputs // panel), k // GROUP
    stream = np.zeros((num_panels, groups, group_bytes(panel)), np.uint8)
    step = max(1, _CHUNK_OUTPUTS // panel)
    for first in range(0, num_panels, step):
        rows = weight[first * panel : (first + step) * panel]
        padded = np.zeros((-(-len(rows) // panel) * panel, k), np.float32)
        padded[: len(rows)] = rows
        _write_panels(stream[first : first + step], padded.reshape(-1, groups, GROUP), unit, panel)
    return AffineWeights(stream, unit)


def unpack_affine(packed: AffineWeights, *, panel: int, outputs: int) -> Floats:
    """The weights that the kernels compute with: float32 `[outputs, k]`."""
    num_panels, groups, _ = packed.stream.shape
    numbers, scales = _parts(packed.stream, panel)
    quantized = numbers.reshape(num_panels, groups, GROUP // 4, panel, 4).transpose(0, 3, 1, 2, 4)
    values = quantized.reshape(num_panels * panel, groups, GROUP).astype(np.float32)
    scale, minimum = (
        np.ascontiguousarray(part).view(np.float16).astype(np.float32).transpose(0, 2, 1).reshape(-1, groups, 1)
        for part in (scales[..., : 2 * panel], scales[..., 2 * panel :])
    )
    return ((values * scale + minimum) * np.float32(packed.unit)).reshape(num_panels * panel, -1)[:outputs]


def _parts(stream: NDArray[np.uint8], panel: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return stream[..., : GROUP * panel], stream[..., GROUP * panel :]


def _write_panels(stream: NDArray[np.uint8], weight: Floats, unit: float, panel: int) -> None:
    """Fill `stream` with `weight` `[outputs, groups, GROUP]`, outputs in whole panels."""
    outputs, groups, _ = weight.shape
    quantized, scale, minimum = _quantize(weight / np.float32(unit))
    numbers, scales = _parts(stream, panel)
    ordered = quantized.reshape(outputs // panel, panel, groups, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    numbers[:] = ordered.reshape(numbers.shape)
    for part, values in ((scales[..., : 2 * panel], scale), (scales[..., 2 * panel :], minimum)):
        by_panel = np.ascontiguousarray(values.reshape(outputs // panel, panel, groups).transpose(0, 2, 1))
        part[:] = by_panel.view(np.uint8)


def _quantize(weight: Floats) -> tuple[NDArray[np.uint8], Halves, Halves]:
    """The nearer of both roundings for each group of `[outputs, groups, GROUP]`."""
    lowest, highest = weight.min(-1), weight.max(-1)
    ranged_scale = ((highest - lowest) / 255).astype(np.float16)
    even_scale = (np.maximum(highest, -lowest) / 127).astype(np.float16)
    ranged, even = (ranged_scale, lowest.astype(np.float16)), (even_scale, even_scale * np.float16(-128))
    quantized, error = _rounded(weight, *ranged)
    even_quantized, even_error = _rounded(weight, *even)
    nearer = even_error < error
    scale, minimum = (np.where(nearer, first, second) for first, second in zip(even, ranged, strict=True))
    return np.where(nearer[..., None], even_quantized, quantized), scale, minimum


def _rounded(weight: Floats, scale: Halves, minimum: Halves) -> tuple[NDArray[np.uint8], Floats]:
    """The bytes that are nearest to `weight` with these scales and minima, and the squared error of each group."""
    step, start = (part.astype(np.float32)[..., None] for part in (scale, minimum))
    quantized = np.rint((weight - start) / np.where(step > 0, step, np.float32(1)))
    np.clip(quantized, 0, 255, out=quantized)
    difference = quantized * step + start - weight
    return quantized.astype(np.uint8), np.einsum("ogk,ogk->og", difference, difference)
