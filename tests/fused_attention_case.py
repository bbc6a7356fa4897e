"""Attention kernels on random sequences: the kernels, compiled for a shape, and a float64 reference by numpy.

As a script it writes what the kernels give for one case: `python fused_attention_case.py OUTPUT.npy`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from twinstage.kv.layout import KvLayout
from twinstage.models.fused.attention import build_attention
from twinstage.models.fused.attention_work import AttentionShape, AttentionWork

NUM_LAYERS = 2
Chunk = tuple[int, int]  # tokens of the step, tokens of the context with these
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Compiled:
    """`plan` and `attend`, to be called from Python."""

    plan: Any
    attend: Any


def make_shape(
    *,
    dtype: str = "float32",
    head_dim: int = 64,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    bfloat16_dot: bool = False,
) -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, bfloat16_dot=bfloat16_dot
    )


def make_layout(shape: AttentionShape, *, block_size: int) -> KvLayout:
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        dtype=shape.dtype,
        model_fingerprint="m",
    )


@cache
def compiled(shape: AttentionShape) -> Compiled:
    kernels = build_attention(shape)
    plan_kernel, attention_kernel = kernels.plan, kernels.attention

    @njit
    def plan(work):
        plan_kernel(work)

    @njit(nogil=True)
    def attend(work, layer, query, query_row, attended, scale, window, thread):
        attention_kernel(work, layer, query, query_row, attended, scale, window, thread)

    return Compiled(plan, attend)


def pack(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Round to a KV number format; bfloat16 as its bits."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unpack(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


class Sequences:
    """Keys, values and queries of every position of some sequences, the keys and values in scattered blocks."""

    def __init__(self, shape: AttentionShape, lengths: Sequence[int], *, block_size: int = 16, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.shape = shape
        self.layout = layout = make_layout(shape, block_size=block_size)
        counts = [layout.blocks_for(length) for length in lengths]
        blocks = random.permutation(sum(counts) + 2)
        ends = np.cumsum(counts)
        self.tables = [blocks[end - count : end] for count, end in zip(counts, ends, strict=True)]
        size = (len(blocks), layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        # What is beyond a sequence in its last block, and in blocks of nobody, must not matter.
        self.kv = pack(np.full(size, np.nan), layout.dtype)
        for length, table in zip(lengths, self.tables, strict=True):
            for position in range(length):
                place = (table[position // layout.block_size], slice(None), slice(None), slice(None))
                values = 1.5 * random.standard_normal((layout.num_layers, 2, layout.num_kv_heads, layout.head_dim))
                self.kv[(*place, position % layout.block_size)] = pack(values, layout.dtype)
        width = (shape.num_heads + 2 * layout.num_kv_heads) * layout.head_dim  # a row also holds new keys and values
        self.works: dict[int, AttentionWork] = {}  # by the number of threads
        self.queries = [random.standard_normal((length, width)).astype(np.float32) for length in lengths]

    def attend(
        self, chunks: Sequence[tuple[int, Chunk]], *, threads: int = 1, window: int = 0, layer: int = 1
    ) -> list[Floats]:
        """Run one step of (sequence, chunk); what each chunk attended to, `[tokens, heads * head_dim]`."""
        layout, tokens = self.layout, sum(chunk[0] for _, chunk in chunks)
        work = self.works.setdefault(threads, AttentionWork(self.shape, num_threads=threads))
        named = [(length, context, self.tables[index].tolist()) for index, (length, context) in chunks]
        work.begin(named, layout=layout, kv_address=self.kv.ctypes.data)
        query = np.concatenate([self.queries[index][end - length : end] for index, (length, end) in chunks])
        attended = np.full((tokens, self.shape.num_heads * layout.head_dim), np.nan, dtype=np.float32)
        kernels = compiled(self.shape)
        kernels.plan(work.address)
        for each in sorted({0, layer}):  # an earlier layer too: what it leaves behind must not matter
            arguments = (work.address, each, query.ctypes.data, query.strides[0], attended.ctypes.data)
            run_threads(kernels.attend, threads, *arguments, layout.head_dim**-0.5, window)
        ends = np.cumsum([chunk[0] for _, chunk in chunks])
        return np.split(attended, ends[:-1])

    def reference(self, index: int, chunk: Chunk, *, window: int = 0, layer: int = 1) -> npt.NDArray[np.float64]:
        length, end = chunk
        layout = self.layout
        kv = unpack(self.kv[self.tables[index], layer])  # [blocks, 2, kv_heads, block_size, head_dim]
        keys, values = kv.transpose(1, 2, 0, 3, 4).reshape(2, layout.num_kv_heads, -1, layout.head_dim)[:, :, :end]
        query = self.queries[index][end - length : end, : self.shape.num_heads * layout.head_dim].astype(np.float64)
        query = query.reshape(length, layout.num_kv_heads, -1, layout.head_dim)
        scores = np.einsum("tkgd,knd->tkgn", query, keys) * layout.head_dim**-0.5
        own, other = np.arange(end - length, end)[:, None], np.arange(end)[None, :]
        unseen = (other > own) | ((other <= own - window) & (window > 0))
        scores = np.where(unseen[:, None, None, :], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("tkgn,knd->tkgd", weights, values).reshape(length, -1)


def run_threads(attend: Any, count: int, *arguments: Any) -> None:
    threads = [threading.Thread(target=attend, args=(*arguments, thread)) for thread in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def vector_width_case() -> list[Floats]:
    """The same on every CPU."""
    shape = make_shape(dtype="float16", head_dim=80, num_heads=2, num_kv_heads=2)
    sequences = Sequences(shape, [300, 150, 200], block_size=5)
    return sequences.attend([(0, (1, 300)), (1, (40, 150)), (2, (3, 200))], window=130)


if __name__ == "__main__":
    np.save(Path(sys.argv[1]), np.concatenate(vector_width_case()))
