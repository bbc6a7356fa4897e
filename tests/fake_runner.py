"""A model of which every token depends on all tokens before it, and that notices when KV is not where it should be.

Its "keys and values" are the tokens themselves, kept per block slot. Logits are a hash of the prefix read back from
the blocks, so a wrong block, a lost chunk or a freed block gives other tokens than the same sequence computed alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from twinstage.engine.core import EngineConfig, EngineCore, StepOutput
from twinstage.engine.plan import StepPlan
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.types import Finish, ProducedToken, PromptLogprobs, RequestId, SamplingParameters, SequenceSpec

VOCAB = 24
BLOCK_SIZE = 4


def prefix_logits(token_ids: Iterable[int]) -> NDArray[np.float32]:
    """`[VOCAB]`, float32."""
    seed = xxhash.xxh3_64_intdigest(np.asarray(list(token_ids), dtype=np.int64).tobytes())
    return np.random.default_rng(seed).normal(scale=2.0, size=VOCAB).astype(np.float32)


class FakeRunner:
    """Runs plans on `memory`: token by (block, offset)."""

    def __init__(self, pool: BlockPool, memory: dict[tuple[int, int], int] | None = None) -> None:
        self.memory: dict[tuple[int, int], int] = {} if memory is None else memory
        self.pool = pool
        self.plans: list[list[tuple[str, int, int, bool]]] = []
        self.fail_next: Exception | None = None

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        self.plans.append([(c.sequence.request_id, c.start, c.length, c.samples) for c in plan.chunks])
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            table = chunk.sequence.table
            written = table.block_ids[chunk.start // BLOCK_SIZE : -(-chunk.end // BLOCK_SIZE)]
            owned = all(self.pool.generation_of(block_id) == table.generation for block_id in written)
            assert owned, "a block that others may read is written"
            tokens = [*chunk.sequence.token_ids_between(0, chunk.start), *chunk.token_ids]
            self.write(chunk.sequence.table.block_ids, tokens, start=chunk.start, end=chunk.end)
        rows = []
        for chunk in plan.chunks:
            seen = self.read(chunk.sequence.table.block_ids, chunk.end)
            tokens = [*chunk.sequence.token_ids_between(0, chunk.start), *chunk.token_ids]
            assert seen == tokens, "the blocks do not hold the sequence"
            rows += [prefix_logits(seen[:end]) for end in range(chunk.end - chunk.num_logits + 1, chunk.end + 1)]
        return np.stack(rows) if rows else np.empty((0, VOCAB), dtype=np.float32)

    def write(self, block_ids: tuple[int, ...], token_ids: list[int], *, start: int, end: int) -> None:
        for position in range(start, end):
            self.memory[block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = token_ids[position]

    def copy_block(self, source: int, target: int) -> None:
        for offset in range(BLOCK_SIZE):
            self.memory.pop((target, offset), None)
            if (source, offset) in self.memory:
                self.memory[target, offset] = self.memory[source, offset]

    def read(self, block_ids: tuple[int, ...], end: int) -> list[int]:
        return [self.memory[block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(end)]


def make_core(
    *,
    num_blocks: int = 64,
    max_num_sequences: int = 4,
    max_tokens_per_step: int = 8,
    max_model_len: int = 100,
    hold: bool = False,
    caches: bool = False,
    hit_multiple: int = 1,
) -> tuple[EngineCore, FakeRunner, BlockPool]:
    pool = BlockPool(num_blocks)
    runner = FakeRunner(pool)
    config = EngineConfig(
        max_num_sequences=max_num_sequences,
        max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        hold_after_first_token=hold,
        prefix_hit_multiple=hit_multiple,
    )
    hasher = PrefixHasher("fake", block_size=BLOCK_SIZE) if caches else None
    return EngineCore(runner, pool, config, hasher=hasher, copy_block=runner.copy_block), runner, pool


def make_spec(
    request_id: str,
    *,
    prompt: Iterable[int] = (1, 2, 3),
    max_tokens: int = 8,
    resumed: Iterable[int] = (),
    stop: Iterable[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    salt: str = "",
    num_choices: int = 1,
    prompt_logprobs: int | None = None,
) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParameters(temperature=temperature, seed=seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop),
        resumed_token_ids=tuple(resumed),
        priority=priority,
        cache_salt=salt,
        num_choices=num_choices,
        prompt_logprobs=prompt_logprobs,
    )


class Collected:
    """Everything an engine reported, by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.produced: dict[str, list[ProducedToken]] = {}
        self.finish: dict[str, Finish] = {}
        self.errors: dict[str, Exception] = {}
        self.prefilled: list[str] = []
        self.finished: list[str] = []
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = {}

    def take(self, output: StepOutput) -> None:
        for chunk in output.chunks:
            assert chunk.request_id not in self.finish, "a token after the end"
            self.tokens.setdefault(chunk.request_id, []).extend(token.token_id for token in chunk.tokens)
            self.produced.setdefault(chunk.request_id, []).extend(chunk.tokens)
            if chunk.finish is not None:
                self.finish[chunk.request_id] = chunk.finish
        for scored in output.scored:
            self.prompt_logprobs.setdefault(scored.request_id, []).append(scored.logprobs)
        for failure in output.failed:
            self.errors[failure.request_id] = failure.error
        self.prefilled += [stats.request_id for stats in output.prefilled]
        self.finished += [stats.request_id for stats in output.finished]


def drain(core: EngineCore, collected: Collected | None = None, *, max_steps: int = 3000) -> Collected:
    """Step until nothing is left to do; every step must compute or report something."""
    collected = Collected() if collected is None else collected
    for _ in range(max_steps):
        if not core.has_work:
            return collected
        output = core.step()
        core.pool.check_integrity()
        assert output.num_computed_tokens or not output.is_empty, "the engine is stuck"
        collected.take(output)
    raise AssertionError("the engine does not come to an end")


def generate_alone(spec: SequenceSpec, *, max_model_len: int = 100) -> tuple[list[int], Finish]:
    """The reference: one sequence, in one chunk, with blocks in plenty."""
    core, _, _ = make_core(num_blocks=256, max_tokens_per_step=1000, max_model_len=max_model_len)
    core.add(spec)
    collected = drain(core)
    return collected.tokens[spec.request_id], collected.finish[spec.request_id]
