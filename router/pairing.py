"""Which workers of one model may work together.

KV blocks of one worker must mean the same on another, and a token must mean the same to all of them, so the workers of
one served name have to agree in everything below. The group that serves first stays while one of its workers is ready;
after it, the largest group follows. The others are refused, with words that say in what they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from twinstage.types import WorkerDescription

_NAMES = {
    "task": "the task",
    "model_fingerprint": "the model's fingerprint",
    "tokenizer_fingerprint": "the tokenizer's fingerprint",
    "kv_layout_fingerprint": "the KV layout's fingerprint",
    "protocol_version": "the protocol version",
    "numerics": "what decides the bits of results",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What the workers of one model share."""

    task: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    kv_layout_fingerprint: str
    protocol_version: int
    numerics: str = ""  # empty: not deterministic


def pairing_of(description: WorkerDescription) -> Pairing:
    model = description.model
    return Pairing(
        task=model.task.value,
        model_fingerprint=model.fingerprint,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        kv_layout_fingerprint=description.kv_layout_fingerprint,
        protocol_version=description.protocol_version,
        numerics=description.numerics,
    )


def choose_pairing(current: Pairing | None, able: Sequence[Pairing]) -> Pairing | None:
    """The pairing that serves, given that of each worker that could, oldest first. None when there is no worker."""
    if current in able or not able:
        return current if able else None
    return Counter(able).most_common(1)[0][0]


def disagreement(pairing: Pairing, chosen: Pairing) -> str:
    """In what a refused worker differs from those that serve."""
    differences = [
        f"{_NAMES[field.name]} is {_value(pairing, field.name)}, theirs is {_value(chosen, field.name)}"
        for field in fields(Pairing)
        if getattr(pairing, field.name) != getattr(chosen, field.name)
    ]
    return "does not fit the model's other workers: " + "; ".join(differences)


def _value(pairing: Pairing, name: str) -> str:
    value = getattr(pairing, name)
    return "not fixed (no --deterministic)" if name == "numerics" and not value else str(value)
