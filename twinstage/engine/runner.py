"""Runs the plan of a step on a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.plan import StepPlan
from twinstage.engine.step_model import Runner
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory

if TYPE_CHECKING:  # each way of computing imports what the other does not need
    from twinstage.kv.store import KvStore
    from twinstage.models.adapt import PagedModel
    from twinstage.models.fused.model import FusedModel


def make_runner(model: PagedModel | FusedModel, layout: KvLayout, memory: BlockMemory) -> Runner:
    """The runner of `model` with its keys and values in `memory`."""
    from twinstage.models.fused.model import FusedModel

    if isinstance(model, FusedModel):
        return FusedRunner(model, layout, memory)
    from twinstage.kv.store import KvStore

    return ModelRunner(model, KvStore(layout, memory))


class ModelRunner:
    """The runner of a Transformers model on paged KV."""

    def __init__(self, model: PagedModel, store: KvStore) -> None:
        self._model = model
        self._store = store

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """As the protocol says."""
        from twinstage.engine.inputs import batch_of_plan

        batch = batch_of_plan(plan, block_size=self._store.layout.block_size)
        return self._model.forward(batch, self._store).numpy()


class FusedRunner:
    """The runner of a fused model."""

    def __init__(self, model: FusedModel, layout: KvLayout, memory: BlockMemory) -> None:
        from twinstage.models.fused.model import FusedChunk, KvView

        self._chunk = FusedChunk
        self._model = model
        self._kv = KvView.of(layout, memory)

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """As the protocol says. The logits are valid until the next step."""
        chunks = [
            self._chunk(
                token_ids=chunk.token_ids,
                start=chunk.start,
                block_ids=chunk.sequence.table.block_ids,
                num_logits=chunk.num_logits,
            )
            for chunk in plan.chunks
        ]
        return self._model.forward(chunks, self._kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRunner:
    """A runner, how it wants to be planned for, and what decides the bits of its results (empty: also the batch)."""

    runner: Runner
    fixed_passes: bool = False
    numerics: str = ""


def choose_runner(
    model: PagedModel | FusedModel, layout: KvLayout, memory: BlockMemory, *, deterministic: bool, chunk_size: int
) -> ChosenRunner:
    """The runner of `model`; in deterministic mode one whose results do not depend on what else is in a batch."""
    from twinstage.models.fused.model import FusedModel

    if not deterministic:
        return ChosenRunner(runner=make_runner(model, layout, memory))
    if isinstance(model, FusedModel):  # its rows are independent of one another by construction
        return ChosenRunner(runner=make_runner(model, layout, memory), numerics=model.numerics)
    from twinstage.engine.fixed_passes import FixedPassRunner
    from twinstage.kv.store import KvStore

    runner = FixedPassRunner(model, KvStore(layout, memory), chunk_size=chunk_size)
    return ChosenRunner(runner=runner, fixed_passes=True, numerics=runner.numerics)
