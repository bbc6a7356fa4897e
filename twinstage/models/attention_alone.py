"""Attention contexts of passes whose rows have nothing to do with one another."""

from __future__ import annotations

from dataclasses import replace

import torch

from twinstage.models.attention import AttentionCall, AttentionContext


class FilledUpAttention:
    """The context of a pass in which rows were appended that nobody needs: they see nothing and are not stored."""

    def __init__(self, inner: AttentionContext, *, num_rows: int) -> None:
        self._inner = inner
        self._needed = slice(0, num_rows)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """As the protocol says; zeros for the rows beyond the first `num_rows`."""
        needed = self._needed
        inner_call = replace(call, query=call.query[:, needed], key=call.key[:, needed], value=call.value[:, needed])
        num_heads, num_tokens, head_dim = call.query.shape
        attended = call.query.new_zeros(num_tokens, num_heads, head_dim)
        attended[needed] = self._inner.attend(inner_call)
        return attended


class OwnTokenAttention:
    """Every token sees itself alone, so it gets its own value."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """As the protocol says."""
        heads_per_kv_head = call.query.shape[0] // call.value.shape[0]
        return call.value.repeat_interleave(heads_per_kv_head, dim=0).transpose(0, 1)
