"""Log probabilities of prompts: how many an answer may carry."""

from __future__ import annotations

from collections.abc import Sequence

from router.limits import MAX_UNARY_PROMPT_LOGPROBS
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.types import SequenceSpec


def check_unary_size(prompts: Sequence[SequenceSpec]) -> None:
    """Refuse what would make too large a message of a unary answer; a stream splits it. Raises InvalidRequest."""
    num_logprobs = sum(
        (len(spec.prompt_token_ids) - 1) * (1 + spec.prompt_logprobs)
        for spec in prompts
        if spec.prompt_logprobs is not None
    )
    if num_logprobs > MAX_UNARY_PROMPT_LOGPROBS:
        what = f"gives {num_logprobs} log probabilities, more than the {MAX_UNARY_PROMPT_LOGPROBS} of a unary call"
        raise InvalidRequest([FieldViolation("output.prompt_logprobs", f"{what}: stream them, or ask for fewer")])
