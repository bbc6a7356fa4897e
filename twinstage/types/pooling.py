"""What pooling models are asked for, as the router and its workers say it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from twinstage.types.basics import Task


class PoolingTask(enum.Enum):
    """What is computed for one input."""

    EMBED = "embed"  # one vector
    TOKEN_EMBED = "token_embed"  # one vector per token
    CLASSIFY = "classify"  # one probability per label
    SCORE = "score"  # one number, for a pair


# What a model of each kind can compute; the first is its own task.
POOLING_TASKS: Mapping[Task, tuple[PoolingTask, ...]] = MappingProxyType(
    {
        Task.EMBED: (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
        Task.CLASSIFY: (PoolingTask.CLASSIFY,),
        Task.SCORE: (PoolingTask.SCORE,),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInput:
    """One input, special tokens included.

    `token_type_ids` has one entry per token, or none where all are 0; a model without token types ignores them.
    The first `prompt_tokens` tokens are computed and left out of the pooling.
    """

    token_ids: Sequence[int]
    token_type_ids: Sequence[int] = ()
    prompt_tokens: int = 0
