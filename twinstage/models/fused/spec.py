"""The shape of a model that the fused path runs, read from its config; other models are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinstage.errors import NotFusible

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles depend on the position alone
HEAD_MULTIPLE = 16  # the attention's vectors
_SIZE_MULTIPLE = 4  # what the tiles unroll


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and options of a dense decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP with SiLU.

    `windows` has for each layer how many tokens a token sees, itself included, or 0 for all. `rope_scale` multiplies
    cosines and sines.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    inverse_frequencies: tuple[float, ...]
    rope_scale: float
    windows: tuple[int, ...]
    qkv_bias: bool
    head_norm: bool
    tied_embedding: bool

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def check_config(config: Mapping[str, Any]) -> None:
    """Raise NotFusible, naming the reason, when config.json describes a model of another shape. Imports nothing."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise NotFusible(f"models of type {model_type!r} are none of {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise NotFusible(f"its activation is {config['hidden_act']}, not silu")
    if config.get("quantization_config"):
        raise NotFusible("its weights are quantized already")
    if config.get("mlp_bias"):
        raise NotFusible("its MLP has biases")
    if config.get("attention_bias") and model_type != "qwen2":
        raise NotFusible("its attention has biases, also after the heads")
    rope = _rope_parameters(config)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in _ROPE_TYPES:
        raise NotFusible(f"its rotary positions are of type {kind}")
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise NotFusible("only part of each head is rotated")
    for name in ("hidden_size", "intermediate_size"):
        if int(config.get(name, 0)) % _SIZE_MULTIPLE:
            raise NotFusible(f"its {name} {config[name]} is not a multiple of {_SIZE_MULTIPLE}")


def read_spec(config: Any) -> ModelSpec:
    """The spec of a Transformers config object that `check_config` let pass. Imports torch and Transformers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inverse_frequencies, rope_scale = _rope(config)
    if head_dim % HEAD_MULTIPLE:
        raise NotFusible(f"its heads have {head_dim} dimensions, not a multiple of {HEAD_MULTIPLE}")
    if len(inverse_frequencies) * 2 != head_dim:
        raise NotFusible(f"heads of {head_dim} dimensions do not rotate as a whole")
    return ModelSpec(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        epsilon=config.rms_norm_eps,
        inverse_frequencies=inverse_frequencies,
        rope_scale=rope_scale,
        windows=_windows(config),
        qkv_bias=config.model_type == "qwen2",
        head_norm=config.model_type == "qwen3",
        tied_embedding=bool(config.tie_word_embeddings),
    )


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings under the name of Transformers 5 or the older one."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and scale, as the stock model computes them."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    import torch

    small = type(config)(**{**config.to_dict(), "num_hidden_layers": 0, "layer_types": []})
    with torch.device("meta"):
        kind = type(model_class.from_config(small).model.rotary_emb)
    rotary = kind(config=config)
    return tuple(rotary.inv_freq.double().tolist()), float(rotary.attention_scaling)


def _windows(config: Any) -> tuple[int, ...]:
    """As the stock model of the type takes them; a configuration may carry keys that its model does not read."""
    num_layers = int(config.num_hidden_layers)
    if config.model_type == "llama":
        return (0,) * num_layers
    window = int(config.sliding_window or 0)
    if config.model_type == "mistral":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in config.layer_types)
