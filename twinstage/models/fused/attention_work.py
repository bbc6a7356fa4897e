"""What the attention kernels of one step work on: an int64 table, `HEADER` entries and then the items.

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
KV, TABLES, TABLE_STRIDE, STARTS, CONTEXTS, NUM_SEQUENCES, NUM_THREADS = range(7)
SCRATCH, SCRATCH_BYTES, COUNTERS, PENDING, PARTIALS, NUM_ITEMS = range(7, 13)
HEADER = 16

# Fields of an item.
SEQUENCE, KV_HEAD, FIRST_ROW, NUM_ROWS, FIRST_TILE, END_TILE, PAIR, PARTIAL = range(8)
ITEM = 8
WHOLE = -1  # PARTIAL of an item that covers all of its context
PREFILL = -2  # PARTIAL of a prefill item


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What is fixed when the kernels are compiled."""

    layout: KvLayout
    num_heads: int

    @property
    def rows_per_token(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.layout.dtype]

    @property
    def head_bytes(self) -> int:
        """Keys (or values) of one head in one block."""
        return self.layout.block_size * self.layout.head_dim * self.value_bytes

    @property
    def values_offset(self) -> int:
        """Bytes from a key to its value."""
        return self.layout.num_kv_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        return 2 * self.values_offset

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
        return self.max_decode_tokens * self.padded_rows * (2 * target().lanes + self.layout.head_dim) * 4

    @property
    def scratch_bytes(self) -> int:
        """Of one thread."""
        return ScratchPlan(self).size


class ScratchPlan:
    """Byte offsets in the scratch of a thread; every part begins at a multiple of 64."""

    def __init__(self, shape: AttentionShape) -> None:
        lanes, head_dim = target().lanes, shape.layout.head_dim
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
    """The table and the memory it points to, for steps of at most `max_tokens` tokens of `max_sequences` sequences.

    `kv_address` is where the blocks begin. Fill it for a step by `begin`; then `plan` and `attention` of `attention.py`
    get `address`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        kv_address: int,
        max_sequences: int,
        max_tokens: int,
        max_model_len: int,
        num_threads: int,
    ) -> None:
        self._layout = layout = shape.layout
        max_tiles = blocks_for(max_model_len, block_size=TILE)
        pairs = max_sequences * layout.num_kv_heads
        split_tiles = min(pairs, SPLIT_BELOW * num_threads) * max_tiles
        groups = blocks_for(max_tokens * shape.rows_per_token, block_size=GROUP) + max_sequences
        max_items = groups * layout.num_kv_heads + pairs + split_tiles
        self._table = np.zeros(HEADER + ITEM * max_items, dtype=np.int64)
        self._starts = np.zeros(max_sequences + 1, dtype=np.int64)
        self._contexts = np.zeros(max_sequences, dtype=np.int64)
        self._block_tables = np.zeros((max_sequences, layout.blocks_for(max_model_len)), dtype=np.int32)
        self._counters = np.zeros(layout.num_layers, dtype=np.int64)
        self._pending = np.zeros(2 * max(1, SPLIT_BELOW * num_threads), dtype=np.int64)
        self._partials = _aligned(split_tiles * shape.partial_bytes)
        scratch_bytes = shape.scratch_bytes
        self._scratch = _aligned(num_threads * scratch_bytes)
        table = self._table
        table[KV], table[NUM_THREADS], table[SCRATCH_BYTES] = kv_address, num_threads, scratch_bytes
        table[TABLE_STRIDE] = self._block_tables.shape[1]
        for index, array in (
            (TABLES, self._block_tables),
            (STARTS, self._starts),
            (CONTEXTS, self._contexts),
            (COUNTERS, self._counters),
            (PENDING, self._pending),
            (PARTIALS, self._partials),
            (SCRATCH, self._scratch),
        ):
            table[index] = array.ctypes.data

    @property
    def address(self) -> int:
        """Where the table begins."""
        return int(self._table.ctypes.data)

    def begin(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Name the sequences of a step: the tokens of each in this step, those in KV with these, and its blocks."""
        start = 0
        for index, (length, context, block_ids) in enumerate(chunks):
            self._contexts[index] = context
            start += length
            self._starts[index + 1] = start
            used = self._layout.blocks_for(context)
            self._block_tables[index, :used] = block_ids[:used]
        self._table[NUM_SEQUENCES] = len(chunks)


def _aligned(count: int) -> npt.NDArray[np.uint8]:
    """`count` bytes that begin at a multiple of 64."""
    memory = np.zeros(count + 64, dtype=np.uint8)
    start = -int(memory.ctypes.data) % 64
    return memory[start : start + count]
