"""Which models the fused path takes, and what becomes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig

from fused_models import tiny_config
from tiny_models import make_tiny_model
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.errors import ComputeFailed, NotFusible
from twinstage.models.adapt import PagedModel
from twinstage.models.choose import load_chosen
from twinstage.models.fused.spec import check_config, read_spec
from twinstage.models.resolve import resolve_model
from twinstage.types import SamplingParameters

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "gpt_neox"}, "gpt_neox"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "biases": ({"mlp_bias": True}, "MLP has biases"),
    "attention biases": ({"attention_bias": True}, "attention has biases"),
    "rope": ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    "part of a head": ({"partial_rotary_factor": 0.5}, "part of each head"),
    "odd size": ({"hidden_size": 99}, "hidden_size 99"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quantized already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_shape_is_refused_by_name(case: str) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    check_config(config)
    changes, named = REFUSED[case]
    with pytest.raises(NotFusible, match=named):
        check_config(config | changes)


def test_auto_falls_back_to_stock_modules_and_int8_does_not(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "gelu", tiny_config("llama", hidden_act="gelu"))
    resolved = resolve_model(str(directory))
    assert isinstance(load_chosen(resolved, weights="auto"), PagedModel)
    with pytest.raises(NotFusible, match="gelu cannot run on the fused path: its activation is gelu"):
        load_chosen(resolved, weights="int8")


def test_a_head_of_its_own_is_not_taken_for_the_embedding(tmp_path: Path) -> None:
    """Transformers keeps both where the configuration ties them and the files hold different ones."""
    directory = make_tiny_model(tmp_path / "tied", tiny_config("llama", tie_word_embeddings=True))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    resolved = resolve_model(str(directory))
    with pytest.raises(NotFusible, match="ties head and embedding, which differ"):
        load_chosen(resolved, weights="fp32", threads=1)
    assert isinstance(load_chosen(resolved, weights="auto", threads=1), PagedModel)


def test_tensors_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "odd", tiny_config("llama"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :-4].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(NotFusible, match=f"{name} is of shape"):
        load_chosen(resolve_model(str(directory)), weights="fp32", threads=1)


def test_keys_that_the_stock_model_does_not_read_change_nothing() -> None:
    llama = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, sliding_window=8)
    assert read_spec(llama).windows == (0, 0)
    mistral = MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, sliding_window=8
    )
    assert read_spec(mistral).windows == (8, 8)


def test_token_ids_beyond_the_vocabulary_fail_their_request_alone(tiny_model: Path) -> None:
    with LLM(str(tiny_model), LlmOptions(weights="fp32", threads=1, kv_cache_bytes=8 << 20)) as llm:
        with pytest.raises(ComputeFailed, match="beyond the vocabulary"):
            llm.generate([[1, 10**6]], SamplingParameters(temperature=0.0), max_tokens=2)
        assert len(llm.generate([[1, 2]], SamplingParameters(temperature=0.0), max_tokens=2)[0].tokens) == 2
