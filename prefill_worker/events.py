"""What a prefill worker reports of a request: at most a first token, then a finished hand-over.

Before the first token come the log probabilities of the prompt's own tokens, where they are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinstage.engine.sequence import SequenceStats
from twinstage.types import PromptLogprobs, SequenceSpec, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of every choice, in order; it may also be the last."""

    chunks: tuple[TokenChunk, ...]
    queue_s: float
    prefill_s: float
    cached_prompt_tokens: int

    @classmethod
    def of(cls, spec: SequenceSpec, chunks: tuple[TokenChunk, ...], stats: SequenceStats) -> FirstToken:
        """That of a request, by the name that its router knows."""
        return cls(
            chunks=tuple(replace(chunk, request_id=spec.request_id) for chunk in chunks),
            queue_s=stats.queue_s,
            prefill_s=stats.prefill_s,
            cached_prompt_tokens=max(0, len(spec.prompt_token_ids) - stats.computed_prompt_tokens),
        )

    @property
    def going_on(self) -> tuple[TokenChunk, ...]:
        """Of the choices that do not end with it."""
        return tuple(chunk for chunk in self.chunks if chunk.finish is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The decode worker has acknowledged the blocks; `transfer_s` counts from the end of the prefill."""

    transport: str
    kv_bytes: int
    transfer_s: float


PrefillEvent = PromptLogprobs | FirstToken | HandedOver
