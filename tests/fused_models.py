"""Fused models for tests, in a cache that all test processes of one run share, and their logits on made-up batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiny_models import MAX_MODEL_LEN, VOCABULARY_SIZE, make_tiny_model
from twinstage.kv.memory import BlockMemory
from twinstage.models.fused.load import load_fused
from twinstage.models.fused.model import FusedChunk, FusedModel, KvView
from twinstage.models.resolve import resolve_model

BLOCK_SIZE = 5  # divides neither chunks nor prompts
Logits = NDArray[np.float32]


class FusedOnBlocks:
    """A fused model with some KV blocks of its own."""

    def __init__(self, model: FusedModel, *, num_blocks: int = 120, block_size: int = BLOCK_SIZE) -> None:
        self.model = model
        self.block_size = block_size
        layout = model.kv_layout(block_size)
        self._memory = BlockMemory.create(num_blocks=num_blocks, block_bytes=layout.block_bytes)
        self._kv = KvView.of(layout, self._memory)
        self._free = list(np.random.default_rng(3).permutation(num_blocks))

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks for a new sequence, in no order."""
        return [int(self._free.pop()) for _ in range(-(-num_tokens // self.block_size))]

    def step(self, *chunks: FusedChunk) -> Logits:
        """A copy of the logits of one step."""
        return self.model.forward(chunks, self._kv).copy()

    def close(self) -> None:
        """Close the KV memory, not the model."""
        self._memory.close()

    def logits(self, token_ids: Sequence[int], *, cuts: Sequence[int] = ()) -> Logits:
        """Logits after the last token, computed in chunks that end at `cuts`."""
        blocks = self.blocks(len(token_ids))
        result = np.zeros((0, 0), np.float32)
        for start, end in zip((0, *cuts), (*cuts, len(token_ids)), strict=True):
            result = self.step(chunk(token_ids, start, end, blocks))
        return result[0]


def chunk(token_ids: Sequence[int], start: int, end: int, blocks: Sequence[int]) -> FusedChunk:
    """Tokens `start .. end - 1` of a sequence; with the logits of the last one when it is the sequence's last."""
    is_last = end == len(token_ids)
    return FusedChunk(token_ids=token_ids[start:end], start=start, block_ids=blocks, num_logits=int(is_last))


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """Random token ids of the tiny vocabulary."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY_SIZE, count)]


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of a small model of odd sizes: no panel, tile or group of the kernels divides them."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 108,
        "intermediate_size": 140,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,  # heads as in the tiny Llama, so that both run the same compiled kernels
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(model_type, **(sizes | changes))


def make_fused(
    directory: Path, config: Any, *, precision: str = "fp32", kv_dtype: str = "float32", threads: int = 1
) -> FusedModel:
    """Write a random model of `config` and load it."""
    # Weights of the usual size, as an error of rounding is judged by its absolute size.
    make_tiny_model(directory, config, weight_scale=1.5)
    return load_fused(resolve_model(str(directory)), precision=precision, kv_dtype=kv_dtype, threads=threads)


@cache
def stock_model(directory: Path) -> Any:
    """The same model by Transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def stock_logits(directory: Path, token_ids: Sequence[int]) -> Logits:
    """What Transformers computes after each token: `[tokens, vocab]`."""
    with torch.inference_mode():
        logits: Logits = stock_model(directory)(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits
