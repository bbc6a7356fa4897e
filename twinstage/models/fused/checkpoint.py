"""The tensors of a model's files, under the names that the stock model gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from twinstage.errors import ModelError, NotFusible
from twinstage.models.fused.packing import Floats
from twinstage.models.weight_files import check_weights

_BASE_PREFIX = "model."  # which files that were saved without the head leave out


class Checkpoint:
    """The tensors of a directory's safetensors files as float32. Imports torch.

    Which files they are says the index, as for the stock model.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ModelError when a file is missing or damaged."""
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in check_weights(directory):
            try:
                file: Any = safe_open(path, framework="pt")
                names = list(file.keys())
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read ({error}); fetch it again") from error
            self._files |= dict.fromkeys(names, file)
        self._is_base = not any(name.startswith(_BASE_PREFIX) for name in self._files)

    def read(self, name: str, *shape: int) -> Floats:
        """Raises NotFusible when there is no such tensor, it has another shape, or numbers that are not finite."""
        found = self._name_in_files(name)
        if found not in self._files:
            raise NotFusible(f"the weights in {self._directory} lack {name}")
        tensor: Floats = self._files[found].get_tensor(found).float().numpy()
        if tensor.shape != shape:  # kernels trust the sizes
            raise NotFusible(f"{name} is of shape {list(tensor.shape)}, and the configuration says {list(shape)}")
        if not np.isfinite(tensor.sum(dtype=np.float64)):
            raise NotFusible(f"{name} has weights that are infinite or no numbers")
        return tensor

    def differ(self, name: str, other: str) -> bool:
        """Whether there are both tensors, with other numbers."""
        names = self._name_in_files(name), self._name_in_files(other)
        if not all(found in self._files for found in names):
            return False
        first, second = (self._files[found].get_tensor(found) for found in names)
        return not bool(first.equal(second))

    def _name_in_files(self, name: str) -> str:
        return name.removeprefix(_BASE_PREFIX) if self._is_base else name
