"""The weight files of a model directory: are they all there and whole, and what identifies them. Free of torch.

A fingerprint must be cheap (it is taken at every start) and still tell models apart. It covers, for every weight
file, its name, its size, its first 4 MiB (with the header: tensor names, shapes, offsets), its last 64 KiB, and 256
samples of 4 KiB in between, and the whole of config.json save what does not concern the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from twinstage.errors import ModelError
from twinstage.models.config_files import (
    pipeline_settings,
    read_json_object,
    read_modules,
    transformer_directory,
)

_HEAD_BYTES = 4 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_SAMPLE_BYTES = 4 * 1024
_NUM_SAMPLES = 256
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_IRRELEVANT_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path"})
_MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_INDEX_NAME = "model.safetensors.index.json"


def check_weights(directory: Path) -> tuple[Path, ...]:
    """The weight files of `directory`, in order of their names.

    Raises ModelError when there are none, when one that the index names is missing, or when one is cut short.
    """
    index_path = directory / _INDEX_NAME
    if index_path.is_file():
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index_path} has no weight_map; fetch the file again")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = ["model.safetensors"]
    paths = tuple(directory / name for name in names)
    for path in paths:
        _check_safetensors(path)
    return paths


def fingerprint_directory(directory: Path) -> str:
    """Identify config and weights of a model directory: 64 hexadecimal digits. Raises ModelError as `check_weights`.

    Of a folder of sentence-transformers, the modules after the transformer and its settings are part of the model.
    """
    home = transformer_directory(directory)
    config = read_json_object(home / "config.json")
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT_CONFIG_KEYS}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for path in check_weights(home):
        digest.update(f"{path.name}:{fingerprint_file(path)};".encode())
    for kind, place in read_modules(directory):
        if kind != "Transformer":
            files = [place / name for name in _MODULE_FILES if (place / name).is_file()]
            digest.update(f"{kind}:{[(path.name, fingerprint_file(path)) for path in files]};".encode())
    if activation := pipeline_settings(directory).get("activation_fn"):
        digest.update(f"activation:{activation};".encode())
    return digest.hexdigest()


def fingerprint_file(path: Path) -> str:
    """Identify a large file by its size and part of its bytes: 64 hexadecimal digits. Raises ModelError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(struct.pack("<Q", size))
            digest.update(file.read(_HEAD_BYTES))
            step = max(1, (size - _HEAD_BYTES) // _NUM_SAMPLES)
            for offset in range(_HEAD_BYTES, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _TAIL_BYTES))
            digest.update(file.read(_TAIL_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _check_safetensors(path: Path) -> None:
    """Raise ModelError unless `path` is a safetensors file with all the bytes that its header announces."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES
            header: Any = json.loads(file.read(header_bytes)) if header_bytes < min(size, _MAX_HEADER_BYTES) else None
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; weights must be in the safetensors format") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        data_bytes = int(max(ends, default=0))
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise ModelError(f"{path} is not a whole safetensors file (its header is damaged); fetch it again") from error
    if size != 8 + header_bytes + data_bytes:
        raise ModelError(f"{path} has {size} bytes instead of {8 + header_bytes + data_bytes}; fetch it again")
