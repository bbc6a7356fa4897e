"""Deterministic mode on stock modules: every token is computed in one way only, whatever else a step computes.

    prompt   chunks that end at multiples of the chunk size and at the prompt's end, each in a pass of its own
    output   token by token; tokens of several sequences share a pass, filled up to one of the widths at which a row
             does not depend on their number (`models/row_trial.py`); attention is computed for each sequence alone

A token is computed in the same way when it is computed again: after a preemption, or on other workers after a failure,
where the tokens produced so far come as resumed ones. So the same request gives the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from twinstage.engine.inputs import paged_chunk
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.kv.memory import BlockMemory
from twinstage.kv.store import KvStore
from twinstage.models.adapt import PagedModel
from twinstage.models.batch import PagedChunk, make_batch
from twinstage.models.row_trial import widths_of_equal_rows

_TRIAL_PROMPT = 48  # tokens
_TRIAL_OUTPUT = 2


class FixedPassRunner:
    """The runner of a model whose rows depend on the number of rows. Needs plans that were made for it."""

    def __init__(self, model: PagedModel, store: KvStore, *, chunk_size: int) -> None:
        self._model = model
        self._store = store
        self._widths = widths_of_equal_rows(model)
        self.numerics = self._describe(chunk_size)

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """As the protocol of runners says."""
        sampled: dict[tuple[int, int], torch.Tensor] = {}  # by chunk and place of the token in it
        produced: list[tuple[int, ScheduledChunk]] = []
        for index, chunk in enumerate(plan.chunks):
            if chunk.start < len(chunk.sequence.spec.prompt_token_ids):
                logits = self._logits_of_prompt(chunk)
                first = chunk.length - len(logits)
                sampled |= {(index, first + place): row for place, row in enumerate(logits)}
            else:
                produced.append((index, chunk))
        for turn in range(max((chunk.length for _, chunk in produced), default=0)):
            rows = [(index, paged_chunk(chunk, turn)) for index, chunk in produced if turn < chunk.length]
            for first in range(0, len(rows), self._widths[-1]):
                part = rows[first : first + self._widths[-1]]
                logits = self._run_rows([row for _, row in part], self._store)
                sampled |= {(index, turn): logits[place] for place, (index, row) in enumerate(part) if row.num_logits}
        if not sampled:
            return np.empty((0, self._model.vocab_size), dtype=np.float32)
        return torch.stack([sampled[place] for place in sorted(sampled)]).numpy()

    def _logits_of_prompt(self, chunk: ScheduledChunk) -> torch.Tensor:
        """`[chunk.num_logits, vocab]`. A token is drawn from the same bits whether or not the prompt is scored."""
        logits = self._run_prompt(paged_chunk(replace(chunk, scores=False)), self._store)
        if not chunk.scores:
            return logits
        scored = self._run_prompt(paged_chunk(chunk), self._store)
        return torch.cat([scored[: chunk.length - len(logits)], logits])

    def _run_prompt(self, chunk: PagedChunk, store: KvStore) -> torch.Tensor:
        return self._model.forward(make_batch([chunk], block_size=store.layout.block_size), store)

    def _run_rows(self, rows: list[PagedChunk], store: KvStore) -> torch.Tensor:
        """Logits `[width, vocab]`, those of `rows` first; `[0, vocab]` when no logits are wanted."""
        width = next(width for width in self._widths if width >= len(rows))
        return self._model.forward_rows(make_batch(rows, block_size=store.layout.block_size), store, width=width)

    def _describe(self, chunk_size: int) -> str:
        widths = "/".join(map(str, self._widths))
        return (
            f"Transformers modules, chunks of {chunk_size}, rows by {widths}, threads {torch.get_num_threads()}, "
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, trial {self._trial(chunk_size)}"
        )

    def _trial(self, chunk_size: int) -> str:
        """A hash of the logits of a few tokens: another machine or library that computes other bits has another."""
        layout = self._store.layout
        num_prompt = max(1, min(_TRIAL_PROMPT, chunk_size, self._model.max_model_len - _TRIAL_OUTPUT))
        num_tokens = num_prompt + _TRIAL_OUTPUT
        token_ids = [(index * 7919 + 13) % self._model.vocab_size for index in range(num_tokens)]
        block_ids = range(layout.blocks_for(num_tokens))
        memory = BlockMemory.create(num_blocks=len(block_ids), block_bytes=layout.block_bytes)
        store = KvStore(layout, memory)
        prompt = PagedChunk(token_ids=token_ids[:num_prompt], start=0, block_ids=block_ids, num_logits=1)
        digest = hashlib.blake2b(self._run_prompt(prompt, store).numpy().tobytes(), digest_size=6)
        for position in range(num_prompt, min(num_tokens, self._model.max_model_len)):
            row = PagedChunk(token_ids=[token_ids[position]], start=position, block_ids=block_ids, num_logits=1)
            digest.update(self._run_rows([row], store)[0].numpy().tobytes())
        memory.close()
        return digest.hexdigest()
