"""Log probabilities of prompt tokens, each from the logits of the token before it."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.sampler import token_logprobs
from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed
from twinstage.types import PromptLogprobs


def score_tokens(logits: NDArray[np.float32], sequence: Sequence, *, first: int) -> PromptLogprobs:
    """Log probabilities of the prompt tokens from position `first` on, one for each row `[rows, vocab]`.

    Raises ComputeFailed where the logits are not numbers.
    """
    token_ids = sequence.token_ids_between(first, first + len(logits))
    count = min(sequence.spec.prompt_logprobs or 0, logits.shape[1])
    logprobs, top_logprobs = array("f"), array("f")
    ranks, top_ids = array("I"), array("I")
    for row, token_id in zip(logits, token_ids, strict=True):
        if not math.isfinite(row.max()):  # NaN counts as the maximum
            raise ComputeFailed(f"the model's logits for request {sequence.request_id} are not numbers")
        scored = token_logprobs(row, token_id, count=count)
        logprobs.append(scored.logprob)
        ranks.append(scored.rank)
        top_ids.extend(entry.token_id for entry in scored.top)
        top_logprobs.extend(entry.logprob for entry in scored.top)
    return PromptLogprobs(
        start=first,
        token_ids=array("I", token_ids),
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
