"""How far one model's next-token distributions are from another's, and the text that it is measured on.

The text comes with Python: four chapters of its language reference (`pydoc_data.topics`), prose with some code in
it. It differs a little between Python's versions, so a result names its checksum.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_TOPICS = ("objects", "execmodel", "exceptions", "import")


def sample_text() -> str:
    """A few thousand tokens of English. Raises LookupError when this Python has no such chapters."""
    return "\n".join(pydoc_data.topics.topics[name] for name in _TOPICS)


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def windows_of(token_ids: list[int], *, count: int, length: int) -> list[list[int]]:
    """The first `count * length` tokens, cut. Raises ValueError when there are not as many."""
    if len(token_ids) < count * length:
        raise ValueError(f"the text has {len(token_ids)} tokens, {count * length} are needed")
    return [token_ids[start : start + length] for start in range(0, count * length, length)]


@dataclass(slots=True)
class Agreement:
    """Collects, token by token, divergence from the reference and whether the most likely next token is the same."""

    divergences: list[float] = field(default_factory=list)  # KL(reference || other), nats
    same_top: list[bool] = field(default_factory=list)

    def add(self, reference: NDArray[np.float32], other: NDArray[np.float32]) -> None:
        """Compare logits `[tokens, vocabulary]`. Raises ValueError when the shapes differ."""
        if reference.shape != other.shape:
            raise ValueError(f"logits of shape {other.shape}, the reference's are {reference.shape}")
        expected, found = _log_probabilities(reference), _log_probabilities(other)
        self.divergences.extend((np.exp(expected) * (expected - found)).sum(-1).tolist())
        self.same_top.extend((expected.argmax(-1) == found.argmax(-1)).tolist())

    @property
    def divergence(self) -> float:
        """The mean over all tokens."""
        return float(np.mean(self.divergences))

    @property
    def top_agreement_percent(self) -> float:
        return 100.0 * float(np.mean(self.same_top))


def _log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted
