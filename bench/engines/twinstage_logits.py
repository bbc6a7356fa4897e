"""What our own engine expects next: `python -m bench.engines.twinstage_logits MODEL THREADS OPTION=VALUE...`.

Options are those of `load_chosen` that are text, such as `weights=int8`. Tokens are computed as decoding computes them,
one of every sequence in a step, so their keys and values go through blocks in the dtype of the KV.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from bench.engines.protocol import Handler, serve
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.runner import make_runner
from twinstage.engine.sequence import Sequence
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import blocks_for
from twinstage.kv.memory import BlockMemory
from twinstage.models.choose import load_chosen
from twinstage.models.resolve import resolve_model
from twinstage.types import RequestId, SamplingParameters, SequenceSpec

_BLOCK_SIZE = 16
_KV_BYTES = 256 * 2**20


class LogitsEngine:
    """Answers the commands."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        loaded = load_chosen(resolve_model(model), threads=threads, **options)  # type: ignore[arg-type]
        layout = loaded.kv_layout(_BLOCK_SIZE)
        self._pool = BlockPool(_KV_BYTES // layout.block_bytes)
        self._memory = BlockMemory.create(num_blocks=self._pool.num_blocks, block_bytes=layout.block_bytes)
        self._runner = make_runner(loaded, layout, self._memory)
        kind = f"Twinstage {options['weights']}"
        self._name = kind if layout.dtype == "float32" else f"{kind}, KV {layout.dtype}"

    def describe(self) -> dict[str, Any]:
        return {"name": self._name, "versions": {}}

    def logits(self, windows: list[list[int]], path: str) -> dict[str, Any]:
        """Write float32 logits `[windows, tokens, vocabulary]` after each token of equally long windows to `path`."""
        sequences = [self._sequence(index, window) for index, window in enumerate(windows)]
        try:
            steps = [self._step(sequences, position) for position in range(len(windows[0]))]
        finally:
            for sequence in sequences:
                sequence.table.release()
        np.save(path, np.stack(steps, axis=1))
        return {}

    def _step(self, sequences: list[Sequence], position: int) -> np.ndarray:
        chunks = tuple(ScheduledChunk(sequence=one, start=position, length=1, samples=True) for one in sequences)
        return self._runner.run(StepPlan(chunks=chunks)).copy()

    def _sequence(self, index: int, token_ids: list[int]) -> Sequence:
        request_id = RequestId(f"window-{index}")
        spec = SequenceSpec(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParameters(temperature=0.0),
            max_tokens=1,
        )
        table = self._pool.allocate(blocks_for(len(token_ids), block_size=_BLOCK_SIZE), owner=request_id)
        return Sequence(spec=spec, table=table, arrival=index, arrived_s=0.0)


def load() -> dict[str, Handler]:
    model, threads, *options = sys.argv[1:]
    engine = LogitsEngine(model, int(threads), dict(option.split("=", 1) for option in options))
    return {"describe": engine.describe, "logits": engine.logits}


if __name__ == "__main__":
    serve(load)
