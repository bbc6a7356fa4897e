"""The prefix cache of the engine, on a fake model that notices every block which does not hold what it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fake_runner import BLOCK_SIZE, VOCAB, Collected, FakeRunner, drain, generate_alone, make_core, make_spec
from twinstage.engine.core import EngineConfig, EngineCore
from twinstage.engine.plan import StepPlan
from twinstage.kv.block_pool import BlockPool, PrefixLookups
from twinstage.kv.layout import blocks_for
from twinstage.kv.prefix_index import BlockHash, PrefixHasher, PrefixIndex
from twinstage.types import ProducedToken, RequestId, SequenceSpec

HASHER = PrefixHasher("fake", block_size=BLOCK_SIZE)
Engine = tuple[EngineCore, FakeRunner, BlockPool]


def computed_in(runner: FakeRunner, name: str) -> list[tuple[int, int]]:
    """(start, length) of the chunks of `name` with several tokens or of its prompt's end."""
    return [(start, length) for plan in runner.plans for chunk, start, length, _ in plan if chunk == name]


def run_alone(core: EngineCore, spec: SequenceSpec) -> Collected:
    core.add(spec)
    return drain(core)


def test_a_repeated_prompt_is_computed_from_its_last_block_on() -> None:
    core, runner, pool = make_core(max_tokens_per_step=100, caches=True)
    for name, start in (("cold", 0), ("warm", 16)):
        collected = run_alone(core, make_spec(name, prompt=range(18), max_tokens=1))
        assert computed_in(runner, name) == [(start, 18 - start)]
        assert collected.tokens[name] == generate_alone(make_spec("x", prompt=range(18), max_tokens=1))[0]
    assert pool.prefix_lookups == PrefixLookups(wanted=8, found=4)
    assert pool.num_free == pool.num_blocks


def test_the_last_token_is_always_computed() -> None:
    core, runner, _ = make_core(max_tokens_per_step=100, caches=True)
    run_alone(core, make_spec("cold", prompt=range(16), max_tokens=1))
    run_alone(core, make_spec("warm", prompt=range(16), max_tokens=1))
    assert computed_in(runner, "warm") == [(12, 4)]


def test_the_stats_tell_what_was_computed() -> None:
    core, _, _ = make_core(caches=True)
    computed = []
    for name in ("cold", "warm"):
        core.add(make_spec(name, prompt=range(18), max_tokens=3))
        while core.has_work:
            computed += [stats.computed_prompt_tokens for stats in core.step().prefilled]
    assert computed == [18, 2]


def test_generated_tokens_are_known_to_the_next_turn() -> None:
    core, runner, _ = make_core(max_tokens_per_step=100, caches=True)
    first = run_alone(core, make_spec("first", prompt=range(10), max_tokens=9)).tokens["first"]
    turn = make_spec("second", prompt=[*range(10), *first, 1, 2, 3], max_tokens=4)
    assert run_alone(core, turn).tokens["second"] == generate_alone(turn)[0]
    # 10 + 9 tokens, of which the last was not computed: 18, that is 4 blocks.
    assert computed_in(runner, "second")[0] == (16, 6)


def test_sequences_that_run_together_compute_their_beginning_once() -> None:
    core, runner, pool = make_core(max_tokens_per_step=8, caches=True)
    for index in range(4):
        core.add(make_spec(f"s{index}", prompt=[*range(24), index], max_tokens=4))
    collected = drain(core)
    prompt_tokens = sum(
        length for index in range(4) for start, length in computed_in(runner, f"s{index}") if start < 24
    )
    assert prompt_tokens == 24
    for index in range(4):
        assert (
            collected.tokens[f"s{index}"] == generate_alone(make_spec("x", prompt=[*range(24), index], max_tokens=4))[0]
        )
    assert pool.num_free == pool.num_blocks


def test_another_salt_finds_nothing() -> None:
    core, runner, _ = make_core(max_tokens_per_step=100, caches=True)
    run_alone(core, make_spec("mine", prompt=range(18), max_tokens=1, salt="a"))
    for name, salt, start in (("other", "b", 0), ("none", "", 0), ("same", "a", 16)):
        run_alone(core, make_spec(name, prompt=range(18), max_tokens=1, salt=salt))
        assert computed_in(runner, name)[0][0] == start


def test_without_a_hasher_everything_is_computed() -> None:
    core, runner, pool = make_core(max_tokens_per_step=100)
    for name in ("first", "second"):
        run_alone(core, make_spec(name, prompt=range(18), max_tokens=1))
        assert computed_in(runner, name) == [(0, 18)]
    assert pool.num_cached == 0


@pytest.mark.parametrize(("multiple", "start"), [(1, 20), (8, 16), (6, 12), (24, 0)])
def test_hits_end_at_multiples_and_chunks_at_fixed_places(multiple: int, start: int) -> None:
    core, runner, _ = make_core(max_tokens_per_step=24, caches=True, hit_multiple=multiple)
    run_alone(core, make_spec("cold", prompt=range(22), max_tokens=1))
    run_alone(core, make_spec("warm", prompt=[*range(22), *range(100, 130)], max_tokens=1))
    ends = [begin + length for begin, length in computed_in(runner, "warm")]
    assert computed_in(runner, "warm")[0][0] == start
    assert ends == [24, 48, 52]


def test_a_preempted_sequence_finds_what_is_left_of_its_blocks() -> None:
    core, runner, pool = make_core(num_blocks=10, max_tokens_per_step=100, caches=True)
    specs = [make_spec(f"s{index}", prompt=range(50 * index, 50 * index + 14), max_tokens=14) for index in range(2)]
    for spec in specs:
        core.add(spec)
    preempted: list[str] = []
    collected = Collected()
    while core.has_work:
        output = core.step()
        preempted += output.preempted
        collected.take(output)
        pool.check_integrity()
    assert preempted == ["s1"]
    restart = [start for start, length in computed_in(runner, "s1") if length > 1]
    assert restart[0] == 0
    assert 0 < restart[1] < 14
    for spec in specs:
        assert (collected.tokens[spec.request_id], collected.finish[spec.request_id]) == generate_alone(spec)
    assert pool.num_free == pool.num_blocks


def test_after_a_reset_everything_is_computed_again() -> None:
    core, runner, pool = make_core(max_tokens_per_step=100, caches=True)
    run_alone(core, make_spec("cold", prompt=range(18), max_tokens=1))
    assert pool.reset_prefix_cache() == 4
    run_alone(core, make_spec("reset", prompt=range(18), max_tokens=1))
    run_alone(core, make_spec("warm", prompt=range(18), max_tokens=1))
    assert [computed_in(runner, name)[0][0] for name in ("reset", "warm")] == [0, 16]


# --- what must not be found ---------------------------------------------------------------------


class FaultyRunner(FakeRunner):
    """While `is_broken`, what it writes is no number; nor are the logits of whoever attends to that."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.is_broken = False
        self.bad: set[tuple[int, int]] = set()  # (block, offset)

    def write(self, block_ids: tuple[int, ...], token_ids: list[int], *, start: int, end: int) -> None:
        super().write(block_ids, token_ids, start=start, end=end)
        slots = {(block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE) for i in range(start, end)}
        self.bad = self.bad | slots if self.is_broken else self.bad - slots

    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        logits = super().run(plan)
        for row, chunk in zip(logits, [chunk for chunk in plan.chunks if chunk.samples], strict=True):
            block_ids = chunk.sequence.table.block_ids
            if any((block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE) in self.bad for i in range(chunk.end)):
                row[:] = np.nan
        return logits


def faulty_engine(**limits: int) -> tuple[EngineCore, FaultyRunner, BlockPool]:
    pool = BlockPool(64)
    runner = FaultyRunner(pool)
    config = EngineConfig(
        **{"max_num_sequences": 4, "max_tokens_per_step": 8, "max_model_len": 100, **limits}, block_size=BLOCK_SIZE
    )
    return EngineCore(runner, pool, config, hasher=HASHER), runner, pool


@pytest.mark.parametrize("broken_step", range(3))
def test_a_prompt_whose_logits_are_no_numbers_leaves_nothing_behind(broken_step: int) -> None:
    """The fault is in an early chunk and shows only in the logits of the last one."""
    core, runner, pool = faulty_engine()
    core.add(make_spec("bad", prompt=range(20)))
    failed: list[str] = []
    for step in range(3):
        runner.is_broken = step == broken_step
        failed += [failure.request_id for failure in core.step().failed]
        assert pool.num_cached == 0
        if step < 2:
            probe = pool.allocate(2, owner="another request", prefix=HASHER.chain(range(8)).hashes)
            assert probe.num_shared == 0, "what nothing was sampled from is found"
            probe.release()
    assert failed == ["bad"]
    runner.is_broken = False
    expected = generate_alone(make_spec("x", prompt=range(20)))[0]
    assert run_alone(core, make_spec("again", prompt=range(20))).tokens["again"] == expected
    assert computed_in(runner, "again")[0] == (0, 8)
    assert run_alone(core, make_spec("warm", prompt=range(20))).tokens["warm"] == expected
    assert computed_in(runner, "warm")[0] == (16, 4)


def test_a_prompt_that_is_aborted_half_way_leaves_nothing_behind_that_nobody_has_tried() -> None:
    core, runner, pool = faulty_engine()
    core.add(make_spec("bad", prompt=range(20)))
    runner.is_broken = True
    core.step()
    core.abort(RequestId("bad"))
    runner.is_broken = False
    assert pool.num_cached == 0
    assert run_alone(core, make_spec("again", prompt=range(20))).errors == {}


def test_a_shared_beginning_that_went_bad_is_computed_again_by_the_next_one() -> None:
    """Somebody whose logits are no numbers lets nobody find what it shares, and those who share it still may go on."""
    core, runner, pool = faulty_engine()
    expected = run_alone(core, make_spec("first", prompt=range(20), max_tokens=12)).tokens["first"]
    for name in ("second", "third"):
        core.add(make_spec(name, prompt=range(20), max_tokens=12))
    core.step()
    with pool.allocate(1, owner="probe", prefix=HASHER.chain(range(4)).hashes) as probe:
        (shared,) = probe.block_ids
        assert probe.num_shared == 1
    runner.bad.add((shared, 0))  # the memory went bad
    (failure, other) = core.step().failed
    assert {failure.request_id, other.request_id} == {"second", "third"}
    runner.is_broken = False
    assert run_alone(core, make_spec("again", prompt=range(20), max_tokens=12)).tokens["again"] == expected
    assert computed_in(runner, "again")[0] == (0, 8)
    assert pool.num_free == pool.num_blocks


def test_received_blocks_are_found_only_once_a_token_was_made_from_them() -> None:
    prefill = make_core(hold=True, caches=True)
    core, runner, pool = faulty_engine()
    spec = make_spec("r", prompt=range(20), max_tokens=8)
    runner.is_broken = True
    hand_over(spec, prefill, (core, runner, pool))  # copies without `write`, so:
    (table,) = pool._tables
    runner.bad.add((table.block_ids[0], 0))
    with pool.allocate(5, owner="next reservation", prefix=HASHER.chain(range(20)).hashes) as reservation:
        assert reservation.num_shared == 0
    (failure,) = core.step().failed
    assert failure.request_id == "r"
    assert (pool.num_cached, pool.num_free) == (0, pool.num_blocks)
    runner.is_broken = False
    runner.bad.clear()
    hand_over(replace(spec, request_id=RequestId("again")), prefill, (core, runner, pool))
    assert not drain(core).errors
    with pool.allocate(5, owner="next reservation", prefix=HASHER.chain(range(20)).hashes) as reservation:
        assert reservation.num_shared == 5


# --- how often the index is asked ---------------------------------------------------------------


def test_a_prompt_that_waits_asks_the_index_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, pool = make_core(num_blocks=16, caches=True)
    core.add(make_spec("old", prompt=range(40, 44), max_tokens=30))
    core.step()
    other = pool.allocate(8, owner="reservation")
    core.add(make_spec("long", prompt=range(40), max_tokens=1))
    asked: list[int] = []
    match = PrefixIndex.match

    def counting(index: PrefixIndex, hashes: Sequence[BlockHash], *, multiple: int = 1) -> list[int]:
        asked.append(len(hashes)) if hashes else None
        return match(index, hashes, multiple=multiple)

    monkeypatch.setattr(PrefixIndex, "match", counting)
    changes = pool.changes
    for _ in range(16):
        core.step()
    assert core.load().waiting == 1
    assert 0 < len(asked) <= 1 + pool.changes - changes < 16
    asked.clear()
    other.release()
    assert "long" in drain(core).finish
    assert asked


# --- anything in any order, on a pair -------------------------------------------------------------


def hand_over(spec: SequenceSpec, source: Engine, target: Engine) -> ProducedToken:
    """Prefill on `source`, copy the blocks that `target` lacks, and go on there; returns the first token."""
    core, runner, _ = source
    core.add(spec)
    output = core.step()
    while not output.chunks:
        output = core.step()
    (computed,) = output.computed
    target_core, target_runner, pool = target
    chain = HASHER.chain([*spec.prompt_token_ids, *spec.resumed_token_ids])
    count = blocks_for(computed.total_tokens, block_size=BLOCK_SIZE)
    table = pool.allocate(count, owner="intake", prefix=chain.hashes)
    for position in range(table.num_shared, count):
        assert pool.generation_of(table.block_ids[position]) == table.generation
        for offset in range(BLOCK_SIZE):
            slot = computed.block_ids[position], offset
            if slot in runner.memory:
                target_runner.memory[table.block_ids[position], offset] = runner.memory[slot]
    token = output.chunks[0].tokens[0]
    target_core.add_prefilled(spec, table, token, hashes=chain)
    core.release(spec.request_id)
    return token


@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_order_of_requests_hand_overs_aborts_steps_and_resets(data: st.DataObject) -> None:
    """Prompts with common beginnings in pools that are too small: every output is that of a sequence computed alone."""
    random = Random(data.draw(st.integers(0, 1 << 32)))
    decode = make_core(
        num_blocks=data.draw(st.integers(8, 20)),
        max_num_sequences=data.draw(st.integers(1, 6)),
        max_tokens_per_step=data.draw(st.integers(1, 12)),
        max_model_len=32,  # 8 blocks
        caches=True,
    )
    prefill = make_core(num_blocks=data.draw(st.integers(8, 20)), hold=True, max_model_len=32, caches=True)
    core, _, pool = decode
    stem = [random.randrange(VOCAB) for _ in range(20)]
    collected, specs, aborted = Collected(), {}, set()
    first: dict[str, int] = {}
    for number in range(data.draw(st.integers(5, 40))):
        action = random.choice(["add", "hand over", "hand over", "abort", "reset", *["step"] * 6])
        if action in ("add", "hand over") and len(specs) < 12:
            name = f"r{number}"
            common = stem[: random.randint(0, 20)]
            spec = make_spec(
                name,
                prompt=[*common, *[random.randrange(VOCAB) for _ in range(random.randint(0, 3))]] or [1],
                max_tokens=random.randint(2, 12),
                temperature=random.choice([0.0, 1.0]),
                seed=number,
                priority=random.randint(-1, 1),
            )
            if action == "add":
                core.add(spec)
                specs[name] = spec
            elif pool.num_free >= blocks_for(len(spec.prompt_token_ids), block_size=BLOCK_SIZE):
                first[name] = hand_over(spec, prefill, decode).token_id
                specs[name] = spec
        elif action == "abort" and specs:
            name = random.choice(sorted(specs))
            if core.abort(RequestId(name)):
                aborted.add(name)
        elif action == "reset":
            random.choice([pool, prefill[2]]).reset_prefix_cache()
        else:
            collected.take(core.step())
        pool.check_integrity()
        prefill[2].check_integrity()
    drain(core, collected)
    assert pool.num_free == pool.num_blocks
    assert prefill[2].num_free == prefill[2].num_blocks
    for name, spec in specs.items():
        tokens, finish = generate_alone(spec, max_model_len=32)
        got = ([first[name]] if name in first else []) + collected.tokens.get(name, [])
        if name in aborted:
            assert got == tokens[: len(got)]
        else:
            assert (got, collected.finish[name]) == (tokens, finish)
    assert not collected.errors
