"""The modules of sentence-transformers that follow the pooling, and activations named by their class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from twinstage.errors import ModelError
from twinstage.models.pooling.layout import ModuleFiles

Step = Callable[[torch.Tensor], torch.Tensor]


def load_steps(modules: Sequence[ModuleFiles]) -> list[Step]:
    """One function [inputs, size] to [inputs, size'] per module. Raises ModelError."""
    return [_load_step(module) for module in modules if module.kind != "Dropout"]  # nothing is dropped in inference


def find_activation(name: str) -> torch.nn.Module:
    """The activation of a class of torch named with its package, such as "torch.nn.Tanh". Raises ModelError."""
    found = getattr(torch.nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or not isinstance(found, type) or not issubclass(found, torch.nn.Module):
        raise ModelError(f"the activation {name!r} is none of torch.nn")
    return found()


def _load_step(module: ModuleFiles) -> Step:
    if module.kind == "Normalize":
        return lambda vectors: torch.nn.functional.normalize(vectors, dim=1)
    weights = _load_weights(module.directory)
    try:
        return _dense(module, weights) if module.kind == "Dense" else _layer_norm(weights)
    except KeyError as error:
        raise ModelError(f"the weights in {module.directory} lack {error}") from error


def _dense(module: ModuleFiles, weights: dict[str, torch.Tensor]) -> Step:
    weight = weights["linear.weight"]
    bias = weights["linear.bias"] if module.settings.get("bias", True) else None
    activation = find_activation(str(module.settings.get("activation_function", "torch.nn.Tanh")))
    adds_input = bool(module.settings.get("use_residual"))
    residual = weights["residual.weight"] if adds_input and weight.shape[0] != weight.shape[1] else None

    def step(vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = activation(torch.nn.functional.linear(vectors, weight, bias))
        if not adds_input:
            return result
        return result + (vectors if residual is None else torch.nn.functional.linear(vectors, residual))

    return step


def _layer_norm(weights: dict[str, torch.Tensor]) -> Step:
    weight, bias = weights["norm.weight"], weights["norm.bias"]
    return lambda vectors: torch.nn.functional.layer_norm(vectors, weight.shape, weight, bias)


def _load_weights(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "model.safetensors"
    try:
        if path.is_file():
            weights = load_file(path)
        else:
            weights = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and torch raise whatever a damaged file makes them
        raise ModelError(f"the weights in {directory} cannot be read: {error}") from error
    return {name: tensor.float() for name, tensor in weights.items()}
