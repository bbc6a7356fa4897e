"""What the attention kernels of one step work on: an int64 table of sizes and addresses, and items.

An item is a piece of work that one thread does alone. Threads take items from a counter, one per layer, so a slow
thread takes fewer; what an item computes does not depend on who takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinstage.kv.layout import DTYPE_BYTES, KvLayout, blocks_for
from twinstage.models.fused.target import target

TILE = 128  # keys that get a softmax of their own; boundaries at multiples of it from position 0
GROUP = 48  # rows of a prefill item that a register tile has as lanes
MAX_GROUPS = 4  # of these in one item, which share the unpacked keys and values
MAX_DECODE_ROWS = 16  # a chunk with no more rows (tokens * heads per KV head) is computed with keys as lanes
SPLIT_BELOW = 4  # fewer pairs (sequence, KV head) per thread than that: contexts are split

# Indices of the header.
KV, BLOCK_SIZE, BLOCK_BYTES, HEAD_BYTES, VALUES_OFFSET, LAYER_BYTES, NUM_LAYERS = range(7)
TABLES, TABLE_STRIDE, STARTS, CONTEXTS, NUM_SEQUENCES, NUM_THREADS = range(7, 13)
SCRATCH, SCRATCH_BYTES, COUNTERS, PENDING, PARTIALS, ITEMS, NUM_ITEMS = range(13, 20)
SAMPLED = 20  # the table of the rows that the last layer needs, or 0 when it needs all
HEADER = 21

# Fields of an item.
SEQUENCE, KV_HEAD, FIRST_ROW, NUM_ROWS, FIRST_TILE, END_TILE, PAIR, PARTIAL = range(8)
ITEM = 8
WHOLE = -1  # PARTIAL of an item that covers all of its context
PREFILL = -2  # PARTIAL of a prefill item


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What is fixed when the kernels are compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 16
    dtype: str  # of keys and values
    bfloat16_dot: bool = False  # all products are of bfloat16 numbers, summed in float32; `dtype` is then bfloat16

    @property
    def rows_per_token(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def decode_panel(self) -> int:
        """Rows of a register tile of decoding: the heads of a token in the fewest equal tiles of at most 4 rows."""
        return blocks_for(self.rows_per_token, block_size=blocks_for(self.rows_per_token, block_size=4))

    @property
    def padded_rows(self) -> int:
        """Rows of a token, filled up to whole register tiles."""
        return blocks_for(self.rows_per_token, block_size=self.decode_panel) * self.decode_panel

    @property
    def max_decode_tokens(self) -> int:
        """Longest chunk that decoding computes."""
        return max(1, MAX_DECODE_ROWS // self.rows_per_token)

    @property
    def partial_bytes(self) -> int:
        """What one tile leaves behind when a context is split: highest score, sum and weighted values of each row."""
        return self.max_decode_tokens * self.padded_rows * (2 * target().lanes + self.head_dim) * 4

    @property
    def scratch_bytes(self) -> int:
        """Of one thread."""
        return ScratchPlan(self).size


class ScratchPlan:
    """Byte offsets in the scratch of a thread; every part begins at a multiple of 64."""

    def __init__(self, shape: AttentionShape) -> None:
        lanes, head_dim = target().lanes, shape.head_dim
        self.size = 0
        self.lines = self._take(8 * (TILE + 2 * lanes))  # addresses of the keys of a tile
        self.row_lines = self._take(8 * GROUP)  # addresses of the rows of a group
        # Prefill, for each group: queries, weighted values, highest score and sum, first and end position seen.
        self.queries = self._take(4 * MAX_GROUPS * head_dim * GROUP)
        self.sums = self._take(4 * MAX_GROUPS * head_dim * GROUP)
        self.states = self._take(4 * MAX_GROUPS * 4 * GROUP)
        self.keys = self._take(4 * TILE * head_dim)
        self.values = self._take(4 * TILE * head_dim)
        self.scores = self._take(4 * TILE * GROUP)
        self.panel = self._take(4 * max(head_dim, 16) * GROUP)
        # Decode.
        rows = shape.max_decode_tokens * shape.padded_rows
        self.decode_queries = self._take(4 * rows * head_dim)
        self.decode_scores = self._take(4 * rows * TILE)
        self.decode_keys = self._take(4 * head_dim * 2 * lanes)
        self.decode_tile = self._take(shape.partial_bytes)
        self.decode_state = self._take(shape.partial_bytes)

    def _take(self, count: int) -> int:
        start = self.size
        self.size += (count + 63) // 64 * 64
        return start


class AttentionWork:
    """The table of a model with KV of `layout`, and the memory it points to, which grows with the steps.

    Fill it for a step by `begin`; `plan` and `attention` of `attention.py` get `address`, which stays.
    """

    def __init__(
        self, shape: AttentionShape, *, num_threads: int, scratch: npt.NDArray[np.uint8] | None = None
    ) -> None:
        self._shape = shape
        self._num_threads = num_threads
        self._table = np.zeros(HEADER, dtype=np.int64)
        self._sequences = self._tokens = self._positions = 0  # what there is room for
        self._layout: KvLayout | None = None
        self._scratch = _aligned(num_threads * shape.scratch_bytes) if scratch is None else scratch
        self._sampled: AttentionWork | None = None
        self._table[NUM_THREADS], self._table[SCRATCH_BYTES] = num_threads, shape.scratch_bytes
        self._table[SCRATCH] = self._scratch.ctypes.data

    @property
    def address(self) -> int:
        """Where the table begins."""
        return int(self._table.ctypes.data)

    def begin(self, chunks: Sequence[tuple[int, int, Sequence[int]]], *, layout: KvLayout, kv_address: int) -> None:
        """Name the sequences of a step: the tokens of each in this step, those in KV with these, and its blocks."""
        tokens = sum(length for length, _, _ in chunks)
        positions = max((context for _, context, _ in chunks), default=0)
        if layout is not self._layout:
            self._describe(layout)
        if len(chunks) > self._sequences or tokens > self._tokens or positions > self._positions:
            self._make_room(len(chunks), tokens, positions, layout)
        start = 0
        for index, (length, context, block_ids) in enumerate(chunks):
            self._contexts[index] = context
            start += length
            self._starts[index + 1] = start
            used = layout.blocks_for(context)
            self._block_tables[index, :used] = block_ids[:used]
        self._table[KV], self._table[NUM_SEQUENCES] = kv_address, len(chunks)

    def begin_sampled(
        self, chunks: Sequence[tuple[int, int, Sequence[int]]] | None, *, layout: KvLayout, kv_address: int
    ) -> None:
        """Name the tokens that the last layer computes, each a chunk of its own; None: all of the step."""
        self._table[SAMPLED] = 0
        if chunks is None:
            return
        if self._sampled is None:
            self._sampled = AttentionWork(self._shape, num_threads=self._num_threads, scratch=self._scratch)
        self._sampled.begin(chunks, layout=layout, kv_address=kv_address)
        self._table[SAMPLED] = self._sampled.address

    def _describe(self, layout: KvLayout) -> None:
        head_bytes = layout.block_size * layout.head_dim * self._shape.value_bytes
        values_offset = layout.num_kv_heads * head_bytes
        table = self._table
        table[BLOCK_SIZE], table[BLOCK_BYTES], table[NUM_LAYERS] = (
            layout.block_size,
            layout.block_bytes,
            layout.num_layers,
        )
        table[HEAD_BYTES], table[VALUES_OFFSET], table[LAYER_BYTES] = head_bytes, values_offset, 2 * values_offset
        self._layout, self._sequences = layout, 0

    def _make_room(self, sequences: int, tokens: int, positions: int, layout: KvLayout) -> None:
        """Room for steps of that size, and for somewhat larger ones."""
        self._sequences, self._tokens = max(self._sequences, 2 * sequences), max(self._tokens, tokens)
        self._positions = max(self._positions, blocks_for(positions, block_size=4 * TILE) * 4 * TILE)
        shape, few = self._shape, SPLIT_BELOW * self._num_threads
        pairs = self._sequences * shape.num_kv_heads
        split_tiles = min(pairs, few) * blocks_for(self._positions, block_size=TILE)
        groups = blocks_for(self._tokens * shape.rows_per_token, block_size=GROUP) + self._sequences
        self._items = np.zeros((groups * shape.num_kv_heads + pairs + split_tiles, ITEM), dtype=np.int64)
        self._starts = np.zeros(self._sequences + 1, dtype=np.int64)
        self._contexts = np.zeros(self._sequences, dtype=np.int64)
        self._block_tables = np.zeros((self._sequences, layout.blocks_for(self._positions)), dtype=np.int32)
        self._counters = np.zeros(layout.num_layers, dtype=np.int64)
        self._pending = np.zeros(2 * pairs, dtype=np.int64)
        self._partials = _aligned(split_tiles * shape.partial_bytes)
        self._table[TABLE_STRIDE] = self._block_tables.shape[1]
        for index, array in (
            (ITEMS, self._items),
            (TABLES, self._block_tables),
            (STARTS, self._starts),
            (CONTEXTS, self._contexts),
            (COUNTERS, self._counters),
            (PENDING, self._pending),
            (PARTIALS, self._partials),
        ):
            self._table[index] = array.ctypes.data


def _aligned(count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes that begin at a multiple of 64."""
    memory = np.zeros(count + 64, dtype=np.uint8)
    start = -int(memory.ctypes.data) % 64
    return memory[start : start + count]
