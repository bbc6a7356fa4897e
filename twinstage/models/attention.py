"""Attention over paged keys and values, as an attention function of Transformers.

A model whose attention implementation is `ATTENTION_NAME` calls `paged_attention` in every layer. It passes the call
on to the `AttentionContext` that came into the forward pass as keyword argument `twinstage_context`: that is where
block tables enter a model that knows nothing of them. `PagedAttention` is the context of a serving step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional
from transformers import AttentionInterface

from twinstage.errors import ModelError
from twinstage.kv.layout import blocks_for
from twinstage.kv.store import KvStore
from twinstage.models.batch import PagedBatch, PagedChunk

ATTENTION_NAME = "twinstage_paged"

# Arguments that change what attention computes and are not implemented here.
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "block_table")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer wants: the queries, keys and values of the tokens of this pass, positions already applied.

    `scaling` None means 1 / sqrt(head_dim); a token sees the `sliding_window` last ones, itself included, or all.
    """

    layer: int
    query: torch.Tensor  # [num_heads, num_tokens, head_dim]
    key: torch.Tensor  # [num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor  # [num_kv_heads, num_tokens, head_dim]
    scaling: float | None
    sliding_window: int | None
    softcap: float | None


class AttentionContext(Protocol):
    """Where keys and values of this pass go and where earlier ones come from."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attended values, `[num_tokens, num_heads, head_dim]`."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    twinstage_context: AttentionContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for a batch of one row; the signature is Transformers'.

    `query` is `[1, num_heads, num_tokens, head_dim]`, `key` and `value` have the KV heads instead. Returns
    `[1, num_tokens, num_heads, head_dim]`. Raises ModelError for attention of a kind that is not implemented.
    """
    used = [name for name in _UNSUPPORTED_ARGUMENTS if others.get(name) is not None]
    if used or attention_mask is not None or not getattr(module, "is_causal", True):
        what = f"the argument {used[0]}" if used else "a mask of its own or attention that is not causal"
        raise ModelError(f"{type(module).__name__} uses {what}, which does not work on paged KV")
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", -1)),
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return twinstage_context.attend(call).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedAttention:
    """The context of one forward pass over `batch`: writes new keys and values to `store`, then attends.

    Tokens that come alone (decoding) are computed together where their contexts take equally many blocks; longer chunks
    one by one. What a token gets depends on its own sequence only; to the last bit with `attend_alone`, which computes
    every sequence by itself, as PyTorch divides the work of a group among threads by the group's size. Masks and tables
    are made once per pass, for the first layer that needs them.
    """

    def __init__(self, batch: PagedBatch, store: KvStore, *, attend_alone: bool = False) -> None:
        self._attend_alone = attend_alone
        self._batch = batch
        self._store = store
        self._single: list[tuple[int, PagedChunk]] = []  # (row, chunk)
        self._several: list[_Segment] = []
        self._groups: dict[int | None, list[_DecodeGroup]] = {}
        row = 0
        for chunk in batch.chunks:
            if chunk.length == 1:
                self._single.append((row, chunk))
            else:
                self._several.append(_Segment(chunk, first_row=row, block_size=batch.block_size))
            row += chunk.length

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """As the protocol says."""
        batch = self._batch
        self._store.write(
            call.layer,
            batch.block_ids,
            offsets=batch.offsets,
            key=call.key.transpose(0, 1),
            value=call.value.transpose(0, 1),
        )
        num_heads, num_tokens, head_dim = call.query.shape
        attended = call.query.new_empty(num_tokens, num_heads, head_dim)
        for segment in self._several:
            segment.attend(call, self._store, attended)
        for group in self._decode_groups(call.sliding_window, call.query.dtype):
            group.attend(call, self._store, attended)
        return attended

    def _decode_groups(self, sliding_window: int | None, dtype: torch.dtype) -> list[_DecodeGroup]:
        if sliding_window not in self._groups:
            together: dict[tuple[int, int], list[_DecodeRow]] = {}
            for row, chunk in self._single:
                decode_row = _DecodeRow(row, chunk, sliding_window=sliding_window, block_size=self._batch.block_size)
                num_blocks = _padded(len(decode_row.block_ids))
                together.setdefault((num_blocks, row if self._attend_alone else 0), []).append(decode_row)
            self._groups[sliding_window] = [
                _DecodeGroup(rows, num_blocks=num_blocks, block_size=self._batch.block_size, dtype=dtype)
                for (num_blocks, _), rows in together.items()
            ]
        return self._groups[sliding_window]


class _Segment:
    """A chunk of several tokens: causal attention over its own tokens and all earlier ones."""

    def __init__(self, chunk: PagedChunk, *, first_row: int, block_size: int) -> None:
        self._chunk = chunk
        self._rows = slice(first_row, first_row + chunk.length)
        self._block_size = block_size
        self._plans: dict[int | None, tuple[int, torch.Tensor, torch.Tensor | None]] = {}

    def attend(self, call: AttentionCall, store: KvStore, attended: torch.Tensor) -> None:
        """Fill this chunk's rows of `attended`."""
        chunk = self._chunk
        first, block_ids, mask = self._plan(call.sliding_window, call.query.dtype)
        if chunk.start == 0:  # nothing earlier: no need to read back what was just written
            # In the store's number format all the same: a result does not depend on where a prompt was cut.
            key, value = (part[:, self._rows].to(store.blocks.dtype) for part in (call.key, call.value))
        else:
            key, value = store.read(call.layer, block_ids, num_tokens=chunk.end - first)
        num_kv_heads, head_dim = key.shape[0], key.shape[2]
        query = call.query[:, self._rows].reshape(num_kv_heads, -1, chunk.length, head_dim)
        output = scaled_attention(query, key.unsqueeze(1), value.unsqueeze(1), mask=mask, call=call)
        attended[self._rows] = output.flatten(0, 1).transpose(0, 1)

    def _plan(self, sliding_window: int | None, dtype: torch.dtype) -> tuple[int, torch.Tensor, torch.Tensor | None]:
        """First position read, block ids to read, and the additive mask (None: plainly causal)."""
        if sliding_window not in self._plans:
            chunk, block_size = self._chunk, self._block_size
            seen_from = 0 if sliding_window is None else max(0, chunk.start - sliding_window + 1)
            first_block = seen_from // block_size
            first = first_block * block_size
            table = chunk.block_ids[first_block : blocks_for(chunk.end, block_size=block_size)]
            plainly_causal = chunk.start == 0 and (sliding_window is None or chunk.length <= sliding_window)
            mask = None if plainly_causal else _mask(first, chunk.start, chunk.end, sliding_window, dtype)
            self._plans[sliding_window] = (first, torch.tensor(table, dtype=torch.int64), mask)
        return self._plans[sliding_window]


class _DecodeRow:
    """A single token: which blocks hold what it sees, and which positions in them."""

    def __init__(self, row: int, chunk: PagedChunk, *, sliding_window: int | None, block_size: int) -> None:
        seen_from = 0 if sliding_window is None else max(0, chunk.end - sliding_window)
        first_block = seen_from // block_size
        self.row = row
        self.block_ids = list(chunk.block_ids[first_block : blocks_for(chunk.end, block_size=block_size)])
        self.seen_from = seen_from - first_block * block_size  # positions within block_ids
        self.seen_to = chunk.end - first_block * block_size


class _DecodeGroup:
    """Single tokens whose contexts take equally many blocks, attended together."""

    def __init__(self, rows: list[_DecodeRow], *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        num_positions = num_blocks * block_size
        self._size = len(rows)
        self._num_positions = num_positions
        self._rows = torch.tensor([row.row for row in rows], dtype=torch.int64)
        # Missing blocks are filled up with the sequence's own first one and masked.
        padded = [row.block_ids + row.block_ids[:1] * (num_blocks - len(row.block_ids)) for row in rows]
        self._block_ids = torch.tensor(padded, dtype=torch.int64).flatten()
        positions = torch.arange(num_positions)
        seen_from = torch.tensor([row.seen_from for row in rows]).unsqueeze(1)
        seen_to = torch.tensor([row.seen_to for row in rows]).unsqueeze(1)
        unseen = (positions < seen_from) | (positions >= seen_to)  # [size, num_positions]
        self._mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf).unsqueeze(1)
        self._unseen = unseen.flatten().nonzero().flatten()

    def attend(self, call: AttentionCall, store: KvStore, attended: torch.Tensor) -> None:
        """Fill this group's rows of `attended`."""
        key, value = (
            # A block's unused tail holds what its last owner left there. It is masked, but an infinity would get
            # through the mask (0 * inf), so it is cleared as well.
            part.index_fill_(1, self._unseen, 0.0).reshape(part.shape[0], self._size, self._num_positions, -1)
            for part in store.read(call.layer, self._block_ids, num_tokens=self._size * self._num_positions)
        )
        num_kv_heads, head_dim = key.shape[0], key.shape[3]
        query = call.query[:, self._rows].reshape(num_kv_heads, -1, self._size, head_dim).transpose(1, 2)
        output = scaled_attention(query, key, value, mask=self._mask, call=call)
        # [num_kv_heads, size, heads per kv head, head_dim] -> [size, num_heads, head_dim]
        attended[self._rows] = output.transpose(0, 1).flatten(1, 2)


def scaled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """softmax(query key^T * scaling + mask) value over the last two dimensions; without a mask, causal.

    The two leading dimensions of `key` and `value` are stretched to those of `query`. `call` gives scaling and softcap.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    leading = query.shape[:2]
    key, value = key.expand(*leading, -1, -1), value.expand(*leading, -1, -1)
    if call.softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=call.scaling
        )
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / call.softcap)) * call.softcap
    scores = scores + (_mask(0, 0, query.shape[-2], None, query.dtype) if mask is None else mask)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _mask(first: int, start: int, end: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask `[end - start, end - first]` of queries at `start .. end - 1` over keys at `first .. end - 1`."""
    queries = torch.arange(start, end).unsqueeze(1)
    keys = torch.arange(first, end)
    unseen = keys > queries
    if sliding_window is not None:
        unseen |= keys <= queries - sliding_window
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)


def _padded(num_blocks: int) -> int:
    """`num_blocks` rounded up to a power of two or the middle between two, so that few group sizes occur."""
    if num_blocks <= 4:
        return num_blocks
    power = 1 << ((num_blocks - 1).bit_length() - 1)  # the largest power of two below
    middle = power + power // 2
    return middle if num_blocks <= middle else 2 * power
