"""One GGUF file to a directory in Transformers' format, dequantised to float32.

Transformers reads GGUF itself, but `from_pretrained` wants another package for it and prints a bar of its own, so this
uses the parts beneath: the config, the tensor names and the tensor layouts are Transformers', the numbers are gguf's.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from twinstage.errors import ModelError

# Untyped parts of Transformers.
_gguf: Any = transformers_gguf
_auto_model: Any = AutoModelForCausalLM

# What the readers raise for damaged files and for architectures they do not know.
_READ_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError, struct.error)
_EOS_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_TOKEN_FIELDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


def convert_gguf(path: Path, directory: Path, *, progress: Callable[[str], None]) -> None:
    """Write config, weights, tokenizer and generation config of `path` into `directory`.

    Raises ModelError when the file is damaged or of an architecture that Transformers cannot read from GGUF.
    """
    progress(f"reading {path.name}")
    try:
        reader = GGUFReader(path)
    except _READ_ERRORS as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        tensors = _read_tensors(path, reader, config, progress)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except _READ_ERRORS as error:
        raise ModelError(f"{path} cannot be converted: {error}") from error
    progress(f"writing {path.stem} as float32")
    config.save_pretrained(directory)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    generation_config = json.dumps(_generation_config(reader), indent=2)
    (directory / "generation_config.json").write_text(generation_config, encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _read_tensors(
    path: Path, reader: GGUFReader, config: Any, progress: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """All tensors under Transformers' names, dequantised to float32."""
    with torch.device("meta"):
        model = _auto_model.from_config(config)
    config.architectures = [type(model).__name__]
    architecture = str(reader.fields["general.architecture"].contents())
    processor = _gguf.TENSOR_PROCESSORS.get(architecture, _gguf.TensorProcessor)(config=config.to_dict())
    names = _gguf.get_gguf_hf_weights_map(_Parameters(model), processor)
    tensors: dict[str, torch.Tensor] = {}
    parsed = {"config": config.to_dict(), "tensors": tensors}  # mixtures of experts write their tensors here themselves
    reported = 0
    for done, tensor in enumerate(reader.tensors, start=1):
        processed = processor.process(
            weights=dequantize(tensor.data, tensor.tensor_type),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters=parsed,
        )
        if processed.name in names:
            tensors[names[processed.name]] = torch.tensor(processed.weights, dtype=torch.float32)
        percent = 100 * done // len(reader.tensors)
        if percent >= reported + 20 or done == len(reader.tensors):
            reported = percent
            progress(f"converting {path.name}: {percent} %")
    _check_complete(path, model, tensors)
    return tensors


class _Parameters:
    """A model's parameters without its modules: mapping the names of each submodule again takes seconds."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _check_complete(path: Path, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless every parameter is there in its shape, save those tied to another."""
    expected = {name: parameter.shape for name, parameter in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    missing = expected.keys() - tensors.keys() - tied
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors, among them {min(missing)}")
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name]:
            raise ModelError(f"{path}: {name} is {tuple(tensor.shape)}, the config says {tuple(expected[name])}")


def _generation_config(reader: GGUFReader) -> dict[str, Any]:
    def token_id(field_name: str) -> int | None:
        field = reader.fields.get(field_name)
        return None if field is None else int(field.contents())

    ends = dict.fromkeys(found for found in map(token_id, _EOS_FIELDS) if found is not None)
    others = {name: token_id(field_name) for name, field_name in _TOKEN_FIELDS.items()}
    return {"eos_token_id": list(ends)} | {name: value for name, value in others.items() if value is not None}
