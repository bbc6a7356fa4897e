"""Runs the plan of a step on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.inputs import batch_of_plan
from twinstage.engine.plan import StepPlan
from twinstage.kv.store import KvStore

if TYPE_CHECKING:  # importing it takes seconds, which start-up checks need not wait for
    from twinstage.models.adapt import PagedModel


class Runner(Protocol):
    """Computes what a step has scheduled."""

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """Compute all chunks, leaving their keys and values in the blocks of their sequences.

        Returns float32 logits `[num_sampling_chunks, vocab_size]`, in the order of the chunks that sample.
        """
        ...


class ModelRunner:
    """The runner of a Transformers model on paged KV."""

    def __init__(self, model: PagedModel, store: KvStore) -> None:
        self._model = model
        self._store = store

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """As the protocol says."""
        batch = batch_of_plan(plan, block_size=self._store.layout.block_size)
        return self._model.forward(batch, self._store).numpy()
