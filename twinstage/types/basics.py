"""Names, roles and constants that every part shares."""

from __future__ import annotations

import enum
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is greedy
SECONDS_PER_PRIORITY_LEVEL = 10.0  # a level is worth so much of waiting, so that no priority starves another


class Task(enum.Enum):
    """What a model is for."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"  # says how well a text fits another one
    CLASSIFY = "classify"  # gives each of its labels a probability


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
