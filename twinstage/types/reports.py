"""What is reported of a request when it is over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of a request went."""

    queue_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which workers served a request, and what moved between them."""

    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    kv_bytes: int = 0
    decode_computed_prompt_tokens: int = 0
    retries: int = 0
