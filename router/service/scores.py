"""Log probabilities of prompts as messages, made on threads, as there may be many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from router.outbox import PromptLogprobsEvent
from twinstage.rpc.convert_public import Speller, prompt_logprobs_to_proto
from twinstage.types import PromptLogprobs
from twinstage.v1 import generation_pb2

LARGE_PART = 1000  # log probabilities in a message of a stream


async def scores_to_proto(
    scores: Mapping[int, Sequence[PromptLogprobs]], spell: Speller, *, num_prompts: int
) -> list[generation_pb2.PromptLogprobs]:
    """A message for each of the prompts, in order; `scores` has the parts of each, none for a prompt of one token."""

    def convert() -> list[generation_pb2.PromptLogprobs]:
        return [
            prompt_logprobs_to_proto(
                (token for part in scores.get(index, ()) for token in part.tokens()),
                start=1,
                prompt_index=index,
                spell=spell,
            )
            for index in range(num_prompts)
        ]

    return await asyncio.to_thread(convert) if num_prompts else []


async def in_parts(event: PromptLogprobsEvent, spell: Speller) -> AsyncGenerator[generation_pb2.PromptLogprobs, None]:
    """Messages of about `LARGE_PART` log probabilities."""
    scores = event.logprobs
    step = max(1, LARGE_PART // (1 + scores.count))
    for first in range(0, len(scores.token_ids), step):
        yield await asyncio.to_thread(
            prompt_logprobs_to_proto,
            scores.tokens(first, first + step),
            start=scores.start + first,
            prompt_index=event.prompt_index,
            spell=spell,
        )
