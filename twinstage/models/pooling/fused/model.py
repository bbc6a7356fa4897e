"""A model as the pooling heads see it: token ids of several inputs to hidden states, on own kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from twinstage.cgroups import usable_cpus
from twinstage.errors import NotFusible
from twinstage.models.fused.formats import WeightFormat, linear_scratch_bytes
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.fused.target import target
from twinstage.models.fused.team import Team
from twinstage.models.pooling.fused.attention_room import scratch_bytes as attention_scratch_bytes
from twinstage.models.pooling.fused.fields import (
    MOST_PART_ROWS,
    SLACK_ROWS,
    EncoderField,
    EncoderLayerField,
)
from twinstage.models.pooling.fused.program import load_program
from twinstage.models.pooling.fused.weights import EncoderWeights, check_encoder
from twinstage.models.pooling.heads import Batching
from twinstage.models.pooling.positions import position_ids
from twinstage.types import PoolingInput

_LOG2_E = 1.4426950408889634
_PAGE = 4096

Part = tuple[int, int]  # its first sequence, and the one behind its last


class FusedBert:
    """The hidden states of the last layer, in float32. Used by one thread at a time."""

    batching = Batching.PACKED

    def __init__(self, model: Any, *, precision: str, threads: int | None, cache_directory: Path) -> None:
        """Takes the weights of a model of Transformers for which `packed_bert.is_known` holds.

        `precision` is "fp32", or "int8" where weights have 8 bits and products are integers. Raises NotFusible.
        """
        config = model.config
        check_encoder(config)
        weight_format = _format_of(precision)
        self._threads = threads or usable_cpus()
        self._size, self._inner_size = int(config.hidden_size), int(config.intermediate_size)
        self._head_dim = self._size // int(config.num_attention_heads)
        self._padding_id = None if config.model_type == "bert" else int(config.pad_token_id)
        self._weights = EncoderWeights(model, weight_format)
        self._tables, self._table = self._make_tables(config)
        self._buffers: dict[EncoderField, AlignedMemory] = {}
        self._next_part = self._room(EncoderField.NEXT_PART, 8).array(np.int64, (1,))
        self._program = load_program(weight_format, cache_directory)
        self._team = Team(self._program, self._tables, self._table, threads=self._threads)

    def hidden(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        lengths = [len(entry.token_ids) for entry in inputs]
        rows = sum(lengths)
        parts, shared = cut_into_parts(lengths, threads=self._threads)
        part_rows = max((sum(lengths[first:end]) for first, end in parts), default=0) + SLACK_ROWS
        shared_rows = sum(lengths[shared[0] : shared[1]]) + SLACK_ROWS if shared is not None else 0
        self._table[EncoderField.PART_ROWS] = part_rows
        self._table[EncoderField.NUM_PARTS] = len(parts)
        self._table[EncoderField.HAS_SHARED] = shared is not None
        self._make_room(rows, max(shared_rows, part_rows * self._threads), longest=max(lengths))
        self._fill(EncoderField.TOKEN_IDS, np.int32, [token_id for entry in inputs for token_id in entry.token_ids])
        self._fill(EncoderField.POSITION_IDS, np.int32, position_ids(inputs, self._padding_id))
        kinds = [kind for entry in inputs for kind in entry.token_type_ids or itertools.repeat(0, len(entry.token_ids))]
        self._fill(EncoderField.TYPE_IDS, np.int32, kinds)
        self._fill(EncoderField.STARTS, np.int64, [0, *itertools.accumulate(lengths)])
        all_parts = [*parts, shared] if shared is not None else parts
        self._fill(EncoderField.PARTS, np.int64, [0, *(end for _, end in all_parts)])
        self._next_part[0] = 0
        self._program(self._table.ctypes.data, 0)
        return torch.from_numpy(self._buffers[EncoderField.HIDDEN].array(np.float32, (rows, self._size)).copy())

    def _make_tables(self, config: Any) -> tuple[AlignedMemory, NDArray[np.int64]]:
        """The table of the model and, in the same memory, those of its layers."""
        layers = self._weights.layers
        memory = AlignedMemory((len(EncoderField) + len(layers) * len(EncoderLayerField)) * 8)
        table: NDArray[np.int64] = memory.array(np.int64, (len(EncoderField),))
        of_layers = memory.array(np.int64, (len(layers), len(EncoderLayerField)), offset=len(EncoderField) * 8)
        table[EncoderField.NUM_THREADS] = self._threads
        table[EncoderField.LAYERS] = memory.address + len(EncoderField) * 8
        table[EncoderField.NUM_LAYERS] = len(layers)
        table[EncoderField.HIDDEN_SIZE] = self._size
        table[EncoderField.INTERMEDIATE_SIZE] = self._inner_size
        table[EncoderField.NUM_HEADS] = config.num_attention_heads
        table[EncoderField.HEAD_DIM] = self._head_dim
        table[EncoderField.EPSILON] = _float_bits(config.layer_norm_eps)
        table[EncoderField.ATTENTION_SCALE] = _float_bits(self._head_dim**-0.5 * _LOG2_E)
        for field, address in self._weights.model.items():
            table[field] = address
        for index, layer in enumerate(layers):
            for layer_field, address in layer.items():
                of_layers[index, layer_field] = address
        return memory, table

    def _make_room(self, rows: int, work_rows: int, *, longest: int) -> None:
        self._room(EncoderField.HIDDEN, rows * self._size * 4)
        self._room(EncoderField.QKV, work_rows * 3 * self._size * 4)
        self._room(EncoderField.ATTENDED, work_rows * self._size * 4)
        self._room(EncoderField.INNER, work_rows * self._inner_size * 4)
        linears = linear_scratch_bytes(max(self._size, self._inner_size))
        scratch = max(linears, attention_scratch_bytes(longest, self._head_dim))
        scratch = -(-scratch // _PAGE) * _PAGE
        if scratch > self._table[EncoderField.SCRATCH_BYTES]:
            self._table[EncoderField.SCRATCH_BYTES] = scratch
            self._room(EncoderField.SCRATCH, scratch * self._threads)

    def _room(self, field: EncoderField, size: int) -> AlignedMemory:
        """The buffer of a field, which is another one when it had to grow."""
        found = self._buffers.get(field)
        if found is None or found.size < size:
            found = self._buffers[field] = AlignedMemory(
                max(size, min(2 * found.size, size + 2**20) if found else size)
            )
            self._table[field] = found.address
        return found

    def _fill(self, field: EncoderField, dtype: type[np.generic], values: Sequence[int]) -> None:
        memory = self._room(field, len(values) * np.dtype(dtype).itemsize)
        memory.array(dtype, (len(values),))[...] = values


def cut_into_parts(lengths: Sequence[int], *, threads: int) -> tuple[list[Part], Part | None]:
    """Parts that threads compute alone, as many for each, and what follows them, if anything, which they share."""
    parts = list(_parts(lengths))
    num_alone = len(parts) // threads * threads
    rest = parts[num_alone:]
    return parts[:num_alone], (rest[0][0], len(lengths)) if rest else None


def _parts(lengths: Sequence[int]) -> Iterator[Part]:
    first = rows = 0
    for index, length in enumerate(lengths):
        if rows and rows + length > MOST_PART_ROWS:
            yield first, index
            first, rows = index, 0
        rows += length
    yield first, len(lengths)


def _format_of(precision: str) -> WeightFormat:
    if precision == "fp32":
        return WeightFormat.FP32
    if not target().integer_dot:
        raise NotFusible("this machine multiplies no bytes (AVX-512 VNNI, AVX-VNNI)")
    return WeightFormat.AFFINE8


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
