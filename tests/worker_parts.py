"""Parts for tests of workers without a model: the real engine over a stand-in for the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.core import EngineConfig, EngineCore
from twinstage.engine.plan import StepPlan
from twinstage.hosting.assemble import EngineParts
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.types import ModelDescription, Role, Task, WorkerDescription, WorkerId

VOCABULARY_SIZE = 64
MAX_MODEL_LEN = 256
WAIT_S = 10.0


def next_token(token_ids: Sequence[int]) -> int:
    """What the stand-in continues `token_ids` with."""
    return (7 * token_ids[-1] + 3 * len(token_ids) + 11) % VOCABULARY_SIZE


def continuation(token_ids: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens."""
    known = list(token_ids)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(token_ids) :]


class StandInRunner:
    """A forward pass whose most likely token is `next_token`. It can be held back and be made to fail."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self._gate.set()
        self._fails = False
        self.entered = threading.Event()
        self.num_steps = 0

    def close_gate(self) -> None:
        """Hold every step from now on; `entered` is set when one is being held."""
        self.entered.clear()
        self._gate.clear()

    def open_gate(self) -> None:
        self._gate.set()

    def fail_next(self) -> None:
        """Let the next step raise."""
        self._fails = True

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        self.num_steps += 1
        self.entered.set()
        assert self._gate.wait(WAIT_S)
        if self._fails:
            self._fails = False
            raise RuntimeError("the forward pass was told to fail")
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        logits = np.zeros((len(sampled), VOCABULARY_SIZE), dtype=np.float32)
        for row, chunk in enumerate(sampled):
            logits[row, next_token(chunk.sequence.token_ids)] = 10.0
        return logits


def engine_parts(
    runner: StandInRunner,
    *,
    num_blocks: int,
    block_size: int,
    tokens_per_step: int = 64,
    max_num_sequences: int = 16,
    holds: bool = False,
    caches: bool = False,
) -> EngineParts:
    """An engine over `runner`, with a pool and (unused) memory of `num_blocks` small blocks."""
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=block_size, dtype="float32", model_fingerprint="stand-in"
    )
    pool = BlockPool(num_blocks)
    config = EngineConfig(
        max_num_sequences=max_num_sequences,
        max_tokens_per_step=tokens_per_step,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        hold_after_first_token=holds,
    )
    hasher = PrefixHasher(layout.fingerprint, block_size=block_size) if caches else None
    return EngineParts(
        core=EngineCore(runner, pool, config, hasher=hasher),
        hasher=hasher,
        pool=pool,
        layout=layout,
        memory=BlockMemory.create(num_blocks=num_blocks, block_bytes=layout.block_bytes),
    )


def description(
    *, num_blocks: int, block_size: int, role: Role = Role.PREFILL, task: Task = Task.GENERATE
) -> WorkerDescription:
    """A worker that serves the stand-in."""
    return WorkerDescription(
        worker_id=WorkerId("stand-in"),
        epoch=1,
        role=role,
        protocol_version=1,
        model=ModelDescription(
            name="stand-in",
            fingerprint="stand-in",
            task=task,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY_SIZE,
            eos_token_ids=(0,),
            tokenizer_fingerprint="bundle",
            embedding_dimensions=2 if task is Task.EMBED else 0,
        ),
        kv_layout_fingerprint="layout",
        total_kv_blocks=num_blocks,
        kv_block_size=block_size,
        kv_block_bytes=1,
        max_num_sequences=16,
        transports=("shm", "tcp"),
    )
