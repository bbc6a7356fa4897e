"""A pooling model as a worker runs it: inputs to batches to results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from twinstage.errors import FieldViolation, InvalidRequest, TaskNotSupported
from twinstage.models.pooling.heads import Batching, Head
from twinstage.types import POOLING_TASKS, PoolingInput, PoolingTask, Task

# Packed batches are small, so that what is between two layers stays in the cache.
_MAX_BATCH_TOKENS = {Batching.PACKED: 1024, Batching.PADDED: 4096, Batching.EQUAL: 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """What others need to know of a loaded pooling model; dimensions are 0 and `labels` empty where there are none.

    `token_dimensions` is the size of a token's vector, which modules after the pooling do not change.
    """

    task: Task
    max_model_len: int
    vocab_size: int
    dimensions: int = 0
    token_dimensions: int = 0
    labels: tuple[str, ...] = ()


class PoolingModel:
    """Token ids to vectors, probabilities or scores. Not thread-safe. Made by `load_pooling`."""

    def __init__(self, head: Head, facts: PoolingFacts) -> None:
        self.facts = facts
        self._head = head

    def encode(
        self, inputs: Sequence[PoolingInput], *, task: PoolingTask | None = None, normalize: bool = True
    ) -> list[NDArray[np.float32]]:
        """One array of float32 per input, in order; `task` None is the model's own.

        EMBED: [dimensions]; TOKEN_EMBED: [tokens, size of the hidden states]; CLASSIFY: [labels]; SCORE: [1].
        `normalize` scales vectors to length 1; a model that does so by itself does it in any case. Raises
        TaskNotSupported, and InvalidRequest when an input is empty, too long or has unknown ids.
        """
        able = POOLING_TASKS[self.facts.task]
        task = task or able[0]
        if task not in able:
            raise TaskNotSupported(f"the model can {' and '.join(known.value for known in able)}, not {task.value}")
        self._check(inputs)
        scales = normalize and task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        results: dict[int, NDArray[np.float32]] = {}
        for batch in _batches([len(entry.token_ids) for entry in inputs], self._head.batching):
            with torch.inference_mode():
                for index, result in zip(batch, self._head.compute([inputs[i] for i in batch], task), strict=True):
                    results[index] = (torch.nn.functional.normalize(result, dim=-1) if scales else result).numpy()
        return [results[index] for index in range(len(inputs))]

    def _check(self, inputs: Sequence[PoolingInput]) -> None:
        violations = []
        limit, vocab_size = self.facts.max_model_len, self.facts.vocab_size
        for index, entry in enumerate(inputs):
            ids, problem = entry.token_ids, ""
            if not 1 <= len(ids) <= limit:
                problem = f"has {len(ids)} tokens, not 1 to {limit}"
            elif not (min(ids) >= 0 and max(ids) < vocab_size):
                problem = f"has ids outside 0 to {vocab_size - 1}"
            if problem:
                violations.append(FieldViolation(f"inputs[{index}].token_ids", problem))
        if violations:
            raise InvalidRequest(violations)


def _batches(lengths: Sequence[int], batching: Batching) -> Iterator[list[int]]:
    """Indices of the inputs, the longest first, in batches of a bounded size, padding included."""
    batch: list[int] = []
    size = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch:
            longest = lengths[batch[0]]
            taken = lengths[index] if batching is Batching.PACKED else longest
            is_full = size + taken > _MAX_BATCH_TOKENS[batching]
            if is_full or (batching is Batching.EQUAL and lengths[index] != longest):
                yield batch
                batch, size = [], 0
        batch.append(index)
        size += lengths[index] if batching is Batching.PACKED else lengths[batch[0]]
    if batch:
        yield batch
