"""Which way an encoder runs: on own kernels, on oneDNN's linear layers, or as Transformers' modules.

What the first two compute is compared with the modules once, at load: a configuration may have keys that they do not
know, and a compiler a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twinstage.errors import ConfigError, NotFusible
from twinstage.models.pooling.heads import Backbone, StockBackbone
from twinstage.models.pooling.packed_bert import PackedBert, can_be_packed, is_known
from twinstage.telemetry.log import get_logger
from twinstage.types import PoolingInput

_TRIAL_LENGTHS = (37, 3)
# Limits of the difference of hidden states, as a share of their size.
_FULL_PRECISION, _WEIGHTS_IN_8_BITS = 1e-3, 0.1

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a model shall run.

    `weights` "stock" means Transformers' modules, "int8" 8-bit weights and integer products where model and machine
    allow it, anything else float32. `dtype` "bfloat16" is for oneDNN.
    """

    weights: str
    dtype: str
    threads: int | None
    cache_directory: Path


def choose_backbone(model: Any, choice: Choice, *, name: str) -> Backbone:
    """Raises ConfigError when `dtype` is bfloat16 and the model is of another kind, or another precision was chosen."""
    if choice.dtype != "float32":
        if not can_be_packed(model):
            raise ConfigError(f"{name} is a {model.config.model_type}, which is computed in float32 only")
        if choice.weights == "int8":
            raise ConfigError("--dtype bfloat16 and --weights int8 are two precisions; choose one")
        return PackedBert(model, getattr(torch, choice.dtype))
    stock = StockBackbone(model, takes_token_types=False)
    if choice.weights == "stock" or not is_known(model.config):
        return stock
    precision = "int8" if choice.weights == "int8" else "fp32"
    try:
        return _fused(model, stock, choice, precision=precision)
    except NotFusible as error:
        report = logger.warning if precision == "int8" else logger.info
        report("the encoder runs in float32 without kernels of its own", model=name, reason=str(error))
    return PackedBert(model) if can_be_packed(model) else stock


def _fused(model: Any, stock: Backbone, choice: Choice, *, precision: str) -> Backbone:
    try:
        from twinstage.models.pooling.fused.model import FusedBert

        fused = FusedBert(model, precision=precision, threads=choice.threads, cache_directory=choice.cache_directory)
    except (NotFusible, MemoryError):
        raise
    except Exception as error:  # libraries' own, of any kind: the model can run without these kernels
        raise NotFusible(f"its kernels cannot be compiled here: {type(error).__name__}: {error}") from error
    difference = difference_of(fused, stock, vocab_size=model.config.vocab_size)
    allowed = _FULL_PRECISION if precision == "fp32" else _WEIGHTS_IN_8_BITS
    if not difference <= allowed:  # also when it is no number
        raise NotFusible(f"hidden states differ by {difference:.2g} of their size, {allowed} is allowed")
    if choice.threads is not None:
        torch.set_num_threads(1)  # what is left to torch is little, and its threads would spin beside the kernels'
    return fused


def difference_of(backbone: Backbone, stock: Backbone, *, vocab_size: int) -> float:
    """The size of the difference of hidden states as a share of theirs, of a few made-up tokens."""
    inputs = [
        PoolingInput(token_ids=[(index * 7919 + 13 * length) % vocab_size for index in range(length)])
        for length in _TRIAL_LENGTHS
    ]
    with torch.inference_mode():
        expected, computed = stock.hidden(inputs), backbone.hidden(inputs)
    return float((computed - expected).norm() / expected.norm())
