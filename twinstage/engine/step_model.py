"""The boundary to the model: a plan goes in, and for every chunk that samples a token comes out, or why not.

A chunk that completes the prompt of several choices gives a token for each, all from the same logits.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.choices import choices_of
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.sampler import Logits, Sampler
from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed, TwinstageError
from twinstage.telemetry.log import get_logger
from twinstage.types import ProducedToken

logger = get_logger(__name__)

Sampled = ProducedToken | ComputeFailed


class Runner(Protocol):
    """Computes a plan: writes keys and values of every chunk.

    Returns float32 logits `[number of chunks with samples, vocab]`, in the order of the chunks. They are read before
    the next call and may be memory that the runner uses again.
    """

    def run(self, plan: StepPlan) -> NDArray[np.float32]: ...


class StepModel:
    """A runner and the sampler after it. For one thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampler = Sampler()

    def compute(self, plan: StepPlan) -> list[list[Sampled]]:
        """By chunk: a token for each choice, or what its logits lacked to give one; nothing if it does not sample.

        Raises TwinstageError, whatever the model raises: the keys and values of the plan are then not to be trusted.
        """
        try:
            logits = self._runner.run(plan)
            sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            if len(logits) != len(sampling):
                raise ComputeFailed(f"the runner returned {len(logits)} rows of logits, not {len(sampling)}")
            sampled = iter(self._sampler.sample(*_by_choice(logits, sampling)))
        # The boundary to the model: whatever it raises ends the sequences of this plan, never the engine.
        except Exception as error:
            logger.exception("step failed", sequences=len(plan.chunks), tokens=plan.num_tokens)
            if isinstance(error, TwinstageError):
                raise
            raise ComputeFailed(f"the model failed: {error!r:.200}") from error
        return [[next(sampled) for _ in range(_num_tokens(chunk))] for chunk in plan.chunks]


def _num_tokens(chunk: ScheduledChunk) -> int:
    return chunk.sequence.spec.num_choices if chunk.samples else 0


def _by_choice(logits: Logits, sequences: list[Sequence]) -> tuple[Logits, list[Sequence]]:
    """A row and a sequence for each choice; the same ones unless there are several somewhere."""
    if all(sequence.spec.num_choices == 1 for sequence in sequences):
        return logits, sequences
    rows = [row for row, sequence in enumerate(sequences) for _ in range(sequence.spec.num_choices)]
    return logits[rows], [choice for sequence in sequences for choice in choices_of(sequence)]
