"""What a prefill worker reports of a request: at most a first token, then a finished hand-over.

Before the first token come the log probabilities of the prompt's own tokens, where they are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.types import PromptLogprobs, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of every choice, in order; it may also be the last."""

    chunks: tuple[TokenChunk, ...]
    queue_s: float
    prefill_s: float
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The decode worker has acknowledged the blocks; `transfer_s` counts from the end of the prefill."""

    transport: str
    kv_bytes: int
    transfer_s: float


PrefillEvent = PromptLogprobs | FirstToken | HandedOver
