"""A few tokens through a fused model and through the stock one, once for packed weights and kernels.

A configuration may have keys that the spec does not know, a checkpoint tensors in another order, a compiler a fault.
All of these give a model that runs and answers with rubbish. The verdict is a file of the cache, so that a prepared
start does not pay for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinstage.cgroups import memory_limit
from twinstage.errors import ModelError
from twinstage.kv.layout import blocks_for
from twinstage.kv.memory import BlockMemory
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.memory import AlignedMemory, Memory
from twinstage.models.fused.model import FusedChunk, FusedModel, KvView
from twinstage.models.fused.weights import tensor_bytes
from twinstage.telemetry.log import get_logger

# Ends of the passes: chunks as in prefill, then tokens alone as in decoding.
_CUTS = (23, 40, 41, 42, 43, 44)
_BLOCK_SIZE = 16
_MEMORY_SHARE = 0.5  # of what is free, for the stock model
# Limits of the difference to the stock logits, as a share of their own size; unrelated logits have 1.4.
_FULL_PRECISION, _KV_IN_16_BITS, _WEIGHTS_IN_8_BITS = 0.01, 0.1, 0.5

Logits = NDArray[np.float32]
logger = get_logger(__name__)


class NotComparedError(Exception):
    """There was nothing to compare with: the stock model could not be run, this time."""


def try_model(model: FusedModel, directory: Path, *, name: str, report: Callable[[str], None]) -> Memory:
    """The verdict on `model`, for `read_verdict`: it computes as the stock model in `directory`, or does not.

    Raises NotComparedError where the stock model cannot be run now, as memory may be short: that is no verdict, and
    nothing to be kept for later starts.
    """
    report(f"comparing {name} on own kernels with the stock model, once for this model")
    cuts = [cut for cut in _CUTS if cut <= model.max_model_len] or [1]
    token_ids = [(index * 7919 + 13) % model.vocab_size for index in range(cuts[-1])]
    try:
        _check_memory(model)
        expected = _stock_logits(directory, token_ids)[[cut - 1 for cut in cuts]]
    except (ModelError, MemoryError, RuntimeError) as error:
        raise NotComparedError(str(error)) from error
    difference, allowed = _difference(_fused_logits(model, token_ids, cuts), expected), tolerance(model)
    logger.info("compared with the stock model", model=name, difference=f"{difference:.2g}", allowed=allowed)
    refusal = ""
    if not difference <= allowed:  # also when it is no number
        refusal = (
            f"{name} gives other logits on the fused path than as stock modules: "
            f"they differ by {difference:.2g} of their size, {allowed} is allowed"
        )
    return AlignedMemory.of(json.dumps({"refusal": refusal}).encode())


def read_verdict(memory: Memory) -> str:
    """Why the model is refused; empty when it is not. Raises ValueError when this is no verdict."""
    verdict = json.loads(bytes(memory.view()))
    if not isinstance(verdict, dict) or not isinstance(verdict.get("refusal"), str):
        raise ValueError("it is no verdict")
    refusal: str = verdict["refusal"]
    return refusal


def tolerance(model: FusedModel) -> float:
    """How far the logits of a model that computes rightly may be from the stock ones."""
    if model.weight_format is not WeightFormat.FP32:
        return _WEIGHTS_IN_8_BITS
    return _FULL_PRECISION if model.kv_layout(_BLOCK_SIZE).dtype == "float32" else _KV_IN_16_BITS


def _difference(computed: Logits, expected: Logits) -> float:
    """The largest, over the rows, of the size of the difference as a share of the size of the expected row."""
    spread = expected - expected.mean(axis=1, keepdims=True)
    size = np.maximum(np.linalg.norm(spread, axis=1), np.finfo(np.float32).tiny)
    return float((np.linalg.norm(computed - expected, axis=1) / size).max())


def _fused_logits(model: FusedModel, token_ids: Sequence[int], cuts: Sequence[int]) -> Logits:
    """`[len(cuts), vocab_size]`, after the last token of each chunk."""
    layout = model.kv_layout(_BLOCK_SIZE)
    block_ids = range(blocks_for(len(token_ids), block_size=_BLOCK_SIZE))
    memory = BlockMemory.create(num_blocks=len(block_ids), block_bytes=layout.block_bytes)
    kv = KvView.of(layout, memory)
    rows = []
    for start, end in pairwise((0, *cuts)):
        part = FusedChunk(token_ids=token_ids[start:end], start=start, block_ids=block_ids, num_logits=1)
        rows.append(model.forward([part], kv)[0].copy())
    memory.close()
    return np.stack(rows)


def _check_memory(model: FusedModel) -> None:
    """Raise MemoryError when the stock model, in float32, would not find room beside this one."""
    needed = sum(tensor_bytes(model.spec, WeightFormat.FP32).values())
    available = min(_available_bytes(), memory_limit())
    if needed > _MEMORY_SHARE * available:
        raise MemoryError(f"it needs {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free")


def _available_bytes() -> float:
    """Of proc_meminfo(5)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


def _stock_logits(directory: Path, token_ids: Sequence[int]) -> Logits:
    """`[tokens, vocab_size]`. Raises ModelError when the model cannot be loaded."""
    import torch

    from twinstage.models.load import load_stock_model

    model: Any = load_stock_model(directory, torch.float32)
    with torch.inference_mode():
        logits: Logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()
    return logits
