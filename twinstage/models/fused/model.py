"""A fused model: packed weights, compiled kernels, the threads that run them, and one call for each step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.errors import ComputeFailed, ConfigError, InternalError
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory
from twinstage.models.fused.attention_work import AttentionShape, AttentionWork
from twinstage.models.fused.buffers import RotaryTable, StepBuffers, Table
from twinstage.models.fused.fields import LayerField, StepField
from twinstage.models.fused.formats import WeightFormat, linear_scratch_bytes
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.native import LoadedProgram
from twinstage.models.fused.packing import padded_panels
from twinstage.models.fused.target import target
from twinstage.models.fused.team import Team
from twinstage.models.fused.weights import PackedWeights, tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedChunk:
    """Consecutive tokens of one sequence, the first at position `start`; as `twinstage.models.batch.PagedChunk`."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    num_logits: int


class FusedModel:
    """A causal language model on paged KV. Used by one thread at a time; `close` ends its other threads."""

    rows_are_independent = True  # a row's bits depend on its own sequence alone

    def __init__(
        self,
        weights: PackedWeights,
        program: LoadedProgram,
        *,
        weight_format: WeightFormat,
        attention: AttentionShape,
        max_model_len: int,
        fingerprint: str,
        artifacts: str,
        threads: int,
    ) -> None:
        """`artifacts` identifies packed weights and kernels."""
        self.spec = weights.spec
        self.vocab_size = weights.spec.vocab_size
        self.max_model_len = max_model_len
        self.weight_format = weight_format
        self.weight_bytes = sum(tensor_bytes(weights.spec, weight_format).values())
        self._fingerprint = fingerprint
        self._artifacts = artifacts
        self._in_use = threading.Lock()
        self._closed = False
        self._weights = weights
        self._program = program
        self._table, self._tables = _make_tables(weights)
        self._buffers = StepBuffers(self._table, _row_bytes(self._table))
        self._rotary = RotaryTable(
            self._table,
            self.spec.inverse_frequencies,
            scale=self.spec.rope_scale,
            positions=max_model_len,
        )
        self._kv_dtype = attention.dtype
        self._attention_numbers = "+bfloat16" if attention.bfloat16_dot else ""
        self._attention = AttentionWork(attention, num_threads=threads)
        self._table[StepField.ATTENTION] = self._attention.address
        self._scratch = AlignedMemory(self._scratch_bytes() * threads)
        self._table[StepField.SCRATCH], self._table[StepField.SCRATCH_BYTES] = (
            self._scratch.address,
            self._scratch_bytes(),
        )
        self._table[StepField.NUM_THREADS] = threads
        self._team = Team(program, self._tables, self._table, threads=threads)

    def kv_layout(self, block_size: int) -> KvLayout:
        """The layout of this model's keys and values in blocks of `block_size` tokens.

        Int8 weights and attention on bfloat16 give other keys and values, so their blocks are not exchanged with those
        of full precision.
        """
        suffix = "" if self.weight_format is WeightFormat.FP32 else f":{self.weight_format}{self._attention_numbers}"
        return KvLayout(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=block_size,
            dtype=self._kv_dtype,
            model_fingerprint=self._fingerprint + suffix,
        )

    def forward(self, chunks: Sequence[FusedChunk], kv: KvView) -> NDArray[np.float32]:
        """Compute all chunks, leaving their keys and values in the blocks.

        Returns float32 logits `[rows, vocab_size]`, of each chunk its last `num_logits` tokens, in their order: a view
        of memory that the next step writes to. Raises ComputeFailed for token ids that are none, InternalError when
        the model is closed, TransferError when the KV memory is.
        """
        with self._in_use:
            if self._closed:
                raise InternalError("the model is closed")
            blocks = kv.mapped()
            self._describe(chunks, kv.layout, blocks.ctypes.data)
            self._program(self._table.ctypes.data, 0)
            del blocks  # kept until here, so that the memory stays mapped whoever closes it
        sampled = int(self._table[StepField.NUM_SAMPLED])
        shape = (sampled, int(self._table[StepField.VOCAB_PANELS]) * target().panel)
        if not sampled:
            return np.zeros((0, self.vocab_size), np.float32)
        logits: NDArray[Any] = self._buffers.array(StepField.LOGITS, np.float32, shape)
        return logits[:, : self.vocab_size]

    @property
    def numerics(self) -> str:
        """What decides the bits of a result: the packed weights and the kernels, for this CPU and KV number format."""
        return f"fused {self.weight_format} {target().cpu} {target().lanes} {self._artifacts}"

    def close(self) -> None:
        """End the threads, after the step that is in progress. Idempotent."""
        with self._in_use:
            self._closed = True
            self._team.close()

    def _describe(self, chunks: Sequence[FusedChunk], layout: KvLayout, kv_address: int) -> None:
        """Write into the tables what this step computes."""
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        sampled = sum(chunk.num_logits for chunk in chunks)
        end = max((chunk.start + len(chunk.token_ids) for chunk in chunks), default=0)
        if end > self.max_model_len:  # there are no angles beyond it
            raise ComputeFailed(f"position {end - 1} lies beyond the {self.max_model_len} of the model")
        self._make_room(rows, sampled, end)
        spans = [(len(chunk.token_ids), chunk.start + len(chunk.token_ids), chunk.block_ids) for chunk in chunks]
        self._attention.begin(spans, layout=layout, kv_address=kv_address)
        wanted = [
            (chunk.num_logits, context, ids)
            for chunk, (_, context, ids) in zip(chunks, spans, strict=True)
            if chunk.num_logits
        ]
        self._attention.begin_sampled(None if sampled == rows else wanted, layout=layout, kv_address=kv_address)
        token_ids = self._buffers.array(StepField.TOKEN_IDS, np.int32, (rows,))
        positions = self._buffers.array(StepField.POSITIONS, np.int64, (rows,))
        sequences = self._buffers.array(StepField.SEQUENCES, np.int64, (rows,))
        sampled_rows = self._buffers.array(StepField.SAMPLED_ROWS, np.int64, (sampled,))
        row = sample = 0
        for index, chunk in enumerate(chunks):
            length = len(chunk.token_ids)
            chosen = slice(row, row + length)
            token_ids[chosen] = chunk.token_ids
            positions[chosen] = chunk.start if length == 1 else np.arange(chunk.start, chunk.start + length)
            sequences[chosen] = index
            row += length
            last = row - 1 if chunk.num_logits == 1 else np.arange(row - chunk.num_logits, row)
            sampled_rows[sample : sample + chunk.num_logits] = last
            sample += chunk.num_logits
        if rows and not 0 <= token_ids.min() <= token_ids.max() < self.vocab_size:  # kernels take them for addresses
            raise ComputeFailed(f"token ids lie beyond the vocabulary of {self.vocab_size}")
        self._table[StepField.NUM_ROWS] = rows
        self._table[StepField.NUM_SAMPLED] = sampled

    def _make_room(self, rows: int, sampled: int, positions: int) -> None:
        for field in _ROW_FIELDS:
            self._buffers.ensure(field, max(rows, 1))
        for field in (StepField.LOGITS, StepField.SAMPLED_ROWS):
            self._buffers.ensure(field, max(sampled, 1))
        self._rotary.ensure(positions)

    def _scratch_bytes(self) -> int:
        """Of one thread, for the linears."""
        most_k = max(self.spec.hidden_size, self.spec.intermediate_size, self.spec.query_size)
        return -(-linear_scratch_bytes(most_k) // 4096) * 4096


@dataclass(frozen=True, slots=True)
class KvView:
    """Where the KV blocks lie."""

    layout: KvLayout
    memory: BlockMemory

    @staticmethod
    def of(layout: KvLayout, memory: BlockMemory) -> KvView:
        """Raises ConfigError when the memory was made for blocks of another size."""
        if memory.block_bytes != layout.block_bytes:
            raise ConfigError(f"KV memory has blocks of {memory.block_bytes} bytes, the layout {layout.block_bytes}")
        return KvView(layout, memory)

    def mapped(self) -> NDArray[np.uint8]:
        """The bytes, which stay mapped as long as the array lives. Raises TransferError when the memory is closed."""
        return np.frombuffer(self.memory.view(), np.uint8)


_ROW_FIELDS = (
    StepField.HIDDEN, StepField.NORMED, StepField.QKV, StepField.ATTENDED, StepField.GATE_UP, StepField.ACTIVATED,
    StepField.TOKEN_IDS, StepField.POSITIONS, StepField.SEQUENCES,
)  # fmt: skip


def _row_bytes(table: Table) -> dict[StepField, int]:
    panel = target().panel
    return {
        StepField.HIDDEN: int(table[StepField.HIDDEN_STRIDE]) * 4,
        StepField.NORMED: int(table[StepField.HIDDEN_SIZE]) * 4,
        StepField.QKV: int(table[StepField.QKV_PANELS]) * panel * 4,
        StepField.ATTENDED: int(table[StepField.NUM_HEADS] * table[StepField.HEAD_DIM]) * 4,
        StepField.GATE_UP: int(table[StepField.GATE_UP_PANELS]) * panel * 4,
        StepField.ACTIVATED: int(table[StepField.INTERMEDIATE_SIZE]) * 4,
        StepField.LOGITS: int(table[StepField.VOCAB_PANELS]) * panel * 4,
        StepField.TOKEN_IDS: 4,
        StepField.POSITIONS: 8,
        StepField.SEQUENCES: 8,
        StepField.SAMPLED_ROWS: 8,
    }


def _make_tables(weights: PackedWeights) -> tuple[Table, AlignedMemory]:
    """The step's table and, in the same memory, that of the layers; all that never changes is filled in."""
    spec = weights.spec
    memory = AlignedMemory((len(StepField) + spec.num_layers * len(LayerField)) * 8)
    table = memory.array(np.int64, (len(StepField),))
    layers = memory.array(np.int64, (spec.num_layers, len(LayerField)), offset=len(StepField) * 8)
    hidden_panels = padded_panels(spec.hidden_size)
    sizes = {
        StepField.LAYERS: memory.address + len(StepField) * 8,
        StepField.NUM_LAYERS: spec.num_layers,
        StepField.HIDDEN_SIZE: spec.hidden_size,
        StepField.HIDDEN_STRIDE: hidden_panels * target().panel,
        StepField.HIDDEN_PANELS: hidden_panels,
        StepField.NUM_HEADS: spec.num_heads,
        StepField.NUM_KV_HEADS: spec.num_kv_heads,
        StepField.HEAD_DIM: spec.head_dim,
        StepField.QKV_PANELS: padded_panels(spec.qkv_size),
        StepField.INTERMEDIATE_SIZE: spec.intermediate_size,
        StepField.GATE_UP_PANELS: padded_panels(2 * spec.intermediate_size),
        StepField.VOCAB_PANELS: padded_panels(spec.vocab_size),
        StepField.EPSILON: _float_bits(spec.epsilon),
        StepField.ATTENTION_SCALE: _float_bits(spec.head_dim**-0.5),
    }
    for field, value in sizes.items():
        table[field] = value
    for name, address in weights.addresses.items():
        layer, _, field_name = name.rpartition(".")
        if layer:
            layers[int(layer), LayerField[field_name]] = address
        else:
            table[StepField[field_name]] = address
    if spec.tied_embedding:
        table[StepField.LM_HEAD] = table[StepField.EMBEDDING]
        table[StepField.LM_HEAD_SCALE] = table[StepField.EMBEDDING_SCALE]
    layers[:, LayerField.WINDOW] = spec.windows
    return table, memory


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
