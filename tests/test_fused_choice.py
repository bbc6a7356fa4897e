"""Which models the fused path takes, and what becomes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fused_models import tiny_config
from tiny_models import make_tiny_model
from twinstage.errors import NotFusible
from twinstage.models.adapt import PagedModel
from twinstage.models.choose import load_chosen
from twinstage.models.fused.spec import check_config
from twinstage.models.resolve import resolve_model

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
