"""The boundary to the model: a plan goes in, and for every chunk that samples a token comes out, or why not."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.plan import StepPlan
from twinstage.engine.sampler import Sampler
from twinstage.errors import ComputeFailed, TwinstageError
from twinstage.telemetry.log import get_logger
from twinstage.types import ProducedToken

logger = get_logger(__name__)


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

    def compute(self, plan: StepPlan) -> list[ProducedToken | ComputeFailed | None]:
        """By chunk: its token, what its logits lacked to give one, or None for a chunk that does not sample.

        Raises TwinstageError, whatever the model raises: the keys and values of the plan are then not to be trusted.
        """
        try:
            logits = self._runner.run(plan)
            sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            if len(logits) != len(sampling):
                raise ComputeFailed(f"the runner returned {len(logits)} rows of logits, not {len(sampling)}")
            sampled = iter(self._sampler.sample(logits, sampling))
        # The boundary to the model: whatever it raises ends the sequences of this plan, never the engine.
        except Exception as error:
            logger.exception("step failed", sequences=len(plan.chunks), tokens=plan.num_tokens)
            if isinstance(error, TwinstageError):
                raise
            raise ComputeFailed(f"the model failed: {error!r:.200}") from error
        return [next(sampled) if chunk.samples else None for chunk in plan.chunks]
