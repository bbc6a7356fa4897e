"""The engine core on a fake model: what comes out equals each sequence computed alone, and no block is ever lost."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fake_runner import (
    BLOCK_SIZE,
    VOCAB,
    Collected,
    FakeRunner,
    drain,
    generate_alone,
    make_core,
    make_spec,
    prefix_logits,
)
from twinstage.engine.core import EngineConfig, EngineCore
from twinstage.engine.plan import StepPlan
from twinstage.errors import (
    AlreadyExists,
    ComputeFailed,
    ConfigError,
    IntegrityError,
    InternalError,
    InvalidRequest,
    KvExhausted,
)
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import blocks_for
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.types import FinishReason, ProducedToken, RequestId, SequenceSpec

R = RequestId("r")


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(prefix_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def test_greedy_output_is_the_models() -> None:
    core, _, pool = make_core()
    core.add(make_spec("r", prompt=range(1, 20), max_tokens=12))
    collected = drain(core)
    assert collected.tokens["r"] == greedy_continuation(list(range(1, 20)), 12)
    assert collected.finish["r"].reason is FinishReason.LENGTH
    assert collected.prefilled == collected.finished == ["r"]
    assert pool.num_free == pool.num_blocks
    assert not core.has_work


def test_long_prompts_are_computed_in_chunks_at_fixed_places() -> None:
    core, runner, _ = make_core(max_tokens_per_step=8)
    core.add(make_spec("a", prompt=range(20), max_tokens=2))
    core.add(make_spec("b", prompt=range(5), max_tokens=2))
    drain(core)
    chunks = [chunk for plan in runner.plans for chunk in plan]
    assert [chunk for chunk in chunks if chunk[0] == "a"] == [
        ("a", 0, 8, False),
        ("a", 8, 8, False),
        ("a", 16, 4, True),
        ("a", 20, 1, True),
    ]
    # `b` does not fit beside the last chunk of `a` as a whole, so it is not cut.
    assert [chunk for chunk in chunks if chunk[0] == "b"] == [("b", 0, 5, True), ("b", 5, 1, True)]
    assert all(sum(length for _, _, length, _ in plan) <= 8 + 4 for plan in runner.plans)


def test_progress_is_reported_after_every_chunk() -> None:
    core, _, _ = make_core(max_tokens_per_step=8)
    core.add(make_spec("r", prompt=range(18), max_tokens=3))
    computed = []
    while core.has_work:
        computed += core.step().computed
    assert [(chunk.num_computed_tokens, chunk.total_tokens, len(chunk.block_ids)) for chunk in computed] == [
        (8, 18, 5),
        (16, 18, 5),
        (18, 18, 5),
    ]
    assert len({chunk.block_ids for chunk in computed}) == 1


@pytest.mark.parametrize("max_tokens_per_step", [1, 3, 8, 50])
@pytest.mark.parametrize("max_num_sequences", [1, 3, 20])
def test_batches_equal_single_sequences(max_tokens_per_step: int, max_num_sequences: int) -> None:
    random = Random(7)
    specs = [
        make_spec(
            f"r{i}",
            prompt=[random.randrange(VOCAB) for _ in range(random.randint(1, 30))],
            max_tokens=random.randint(1, 15),
            temperature=random.choice([0.0, 1.0]),
            seed=i,
            stop=[random.randrange(VOCAB)],
            min_tokens=random.randint(0, 1),
        )
        for i in range(12)
    ]
    core, runner, pool = make_core(max_tokens_per_step=max_tokens_per_step, max_num_sequences=max_num_sequences)
    for spec in specs:
        core.add(spec)
    collected = drain(core)
    for spec in specs:
        tokens, finish = generate_alone(spec)
        assert collected.tokens[spec.request_id] == tokens
        assert collected.finish[spec.request_id] == finish
    assert max(len(plan) for plan in runner.plans) <= max_num_sequences
    assert pool.num_free == pool.num_blocks
    assert core.load().finished == 12


# --- how a generation ends ---------------------------------------------------------------------------


def test_a_stop_token_ends_the_generation_and_is_named() -> None:
    expected = greedy_continuation([1, 2, 3], 6)
    core, _, _ = make_core()
    core.add(make_spec("r", max_tokens=20, stop=[expected[4]]))
    collected = drain(core)
    length = expected.index(expected[4]) + 1
    assert collected.tokens["r"] == expected[:length]
    assert collected.finish["r"].reason is FinishReason.STOP
    assert collected.finish["r"].matched_token_id == expected[4]


def test_the_first_token_may_be_the_last() -> None:
    (first,) = greedy_continuation([1, 2, 3], 1)
    for spec, reason in (
        (make_spec("r", max_tokens=1), FinishReason.LENGTH),
        (make_spec("r", stop=[first]), FinishReason.STOP),
        (make_spec("r", stop=[first], max_tokens=1), FinishReason.STOP),
    ):
        for hold in (False, True):
            core, _, pool = make_core(hold=hold)
            core.add(spec)
            collected = drain(core)
            assert collected.tokens["r"] == [first]
            assert collected.finish["r"].reason is reason
            assert collected.prefilled == collected.finished == ["r"]
            assert pool.num_free == pool.num_blocks - (1 if hold else 0), "they may be on their way already"
            assert not core.abort(R)
            assert pool.num_free == pool.num_blocks


def test_stop_tokens_wait_for_min_tokens() -> None:
    every = range(VOCAB // 2)
    core, _, _ = make_core()
    core.add(make_spec("r", max_tokens=20, stop=every, min_tokens=7))
    tokens = drain(core).tokens["r"]
    assert len(tokens) > 7
    assert all(token not in every for token in tokens[:7])


def test_the_context_limit_ends_a_generation_and_length_wins() -> None:
    for max_tokens, reason in ((30, FinishReason.CONTEXT_LIMIT), (7, FinishReason.LENGTH)):
        core, _, _ = make_core(max_model_len=10)
        core.add(make_spec("r", prompt=[1, 2, 3], max_tokens=max_tokens))
        collected = drain(core)
        assert len(collected.tokens["r"]) == 7
        assert collected.finish["r"].reason is reason


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_prompts_at_the_limit(length: int) -> None:
    core, runner, pool = make_core(max_model_len=10)
    core.add(make_spec("r", prompt=[1] * length))
    collected = drain(core)
    if length < 10:
        assert len(collected.tokens["r"]) == 10 - length
    else:
        assert isinstance(collected.errors["r"], InvalidRequest)
        assert not runner.plans
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("bad", [{"prompt": []}, {"max_tokens": 2, "resumed": [4, 5]}])
def test_impossible_specs_fail_without_computing(bad: dict[str, Any]) -> None:
    core, runner, _ = make_core()
    core.add(make_spec("r", **bad))
    assert core.has_work
    collected = drain(core)
    assert isinstance(collected.errors["r"], InvalidRequest)
    assert not runner.plans
    core.add(make_spec("r"))  # the id is free again


def test_resumed_tokens_count_and_the_continuation_is_the_same() -> None:
    for temperature in (0.0, 1.0):
        whole, finish = generate_alone(make_spec("r", max_tokens=12, temperature=temperature, seed=3))
        for resumed in range(1, 12):
            spec = make_spec("r", max_tokens=12, temperature=temperature, seed=3, resumed=whole[:resumed])
            core, _, _ = make_core(max_tokens_per_step=4)
            core.add(spec)
            collected = drain(core)
            assert collected.tokens["r"] == whole[resumed:]
            assert collected.finish["r"] == finish


# --- the hand-over -----------------------------------------------------------------------------------


def hand_over(
    spec: SequenceSpec, source: tuple[EngineCore, FakeRunner], target: tuple[EngineCore, FakeRunner, BlockPool]
) -> ProducedToken:
    """Prefill on `source`, copy the blocks, and add the sequence to `target`; returns the first token."""
    core, runner = source
    core.add(spec)
    output = core.step()
    while not output.chunks:
        output = core.step()
    (computed,) = output.computed
    target_core, target_runner, pool = target
    table = pool.allocate(blocks_for(computed.total_tokens, block_size=BLOCK_SIZE), owner="intake")
    for from_id, to_id in zip(computed.block_ids, table.block_ids, strict=True):
        for offset in range(BLOCK_SIZE):
            if (from_id, offset) in runner.memory:
                target_runner.memory[to_id, offset] = runner.memory[from_id, offset]
    token = output.chunks[0].tokens[0]
    target_core.add_prefilled(spec, table, token)
    core.release(spec.request_id)
    return token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 17])
def test_prefill_here_and_decode_there_equal_one_engine(prompt_length: int, temperature: float) -> None:
    prefill_core, prefill_runner, prefill_pool = make_core(hold=True)
    target = make_core()
    expected, finish = generate_alone(make_spec("r", prompt=range(prompt_length), temperature=temperature, seed=9))
    for resumed in (0, 3):
        spec = make_spec("r", prompt=range(prompt_length), temperature=temperature, seed=9, resumed=expected[:resumed])
        first = hand_over(spec, (prefill_core, prefill_runner), target)
        collected = drain(target[0])
        assert [first.token_id, *collected.tokens["r"]] == expected[resumed:]
        assert collected.finish["r"] == finish
        assert collected.prefilled == []
        assert target[1].plans[0] == [
            ("r", prompt_length + resumed, 1, True)
        ]  # nothing of the prompt is computed again
        target[1].plans.clear()
        for pool in (prefill_pool, target[2]):
            pool.check_integrity()
            assert pool.num_free == pool.num_blocks


def test_a_held_sequence_keeps_its_blocks_until_released() -> None:
    core, runner, pool = make_core(hold=True)
    core.add(make_spec("r", prompt=range(10)))
    output = core.step()
    output = core.step()
    (chunk,) = output.chunks
    assert chunk.finish is None
    assert [stats.request_id for stats in output.prefilled] == ["r"]
    assert not core.has_work
    assert pool.num_blocks - pool.num_free == 3
    assert runner.read(output.computed[0].block_ids, 10) == list(range(10))
    with pytest.raises(AlreadyExists):
        core.add(make_spec("r"))
    core.release(R)
    core.release(R)
    core.release(RequestId("unknown"))
    assert pool.num_free == pool.num_blocks
    assert core.load().finished == 1


def test_release_leaves_sequences_alone_that_are_not_held() -> None:
    core, _, _ = make_core(hold=True)
    core.add(make_spec("r", prompt=range(20)))
    core.release(R)
    core.step()
    core.release(R)
    assert "r" in drain(core).tokens


def test_prefilled_sequences_are_checked_and_stay_the_callers_when_refused() -> None:
    core, _, pool = make_core()
    token = ProducedToken(token_id=5)
    table = pool.allocate(2, owner="intake")
    with pytest.raises(IntegrityError):
        core.add_prefilled(make_spec("r", prompt=range(9)), table, token)
    core.add(make_spec("r"))
    with pytest.raises(AlreadyExists):
        core.add_prefilled(make_spec("r"), table, token)
    assert len(table) == 2


def test_a_first_token_that_ends_here_is_reported_without_a_step() -> None:
    core, runner, pool = make_core(max_model_len=9)
    core.add_prefilled(make_spec("r", prompt=range(8)), pool.allocate(2, owner="intake"), ProducedToken(token_id=5))
    assert core.has_work
    collected = drain(core)
    assert collected.tokens["r"] == []
    assert collected.finish["r"].reason is FinishReason.CONTEXT_LIMIT
    assert collected.finished == ["r"]
    assert not runner.plans
    assert pool.num_free == pool.num_blocks


# --- running out of blocks ---------------------------------------------------------------------------


def test_preempted_sequences_continue_as_if_nothing_had_happened() -> None:
    specs = [
        make_spec(f"r{i}", prompt=range(i, i + 6), max_tokens=26, temperature=i % 2, seed=i, priority=i % 3)
        for i in range(8)
    ]
    core, runner, pool = make_core(num_blocks=12, max_num_sequences=8)  # 1.5 sequences of final size
    for spec in specs:
        core.add(spec)
    collected = drain(core)
    for spec in specs:
        assert (collected.tokens[spec.request_id], collected.finish[spec.request_id]) == generate_alone(spec)
    assert sorted(collected.prefilled) == sorted(collected.finished) == [spec.request_id for spec in specs]
    recomputed = [chunk for plan in runner.plans for chunk in plan if chunk[1] == 0]
    assert len(recomputed) > len(specs), "the test has to preempt something"
    assert pool.num_free == pool.num_blocks


def test_prefilled_sequences_survive_preemption_too() -> None:
    prefill_core, prefill_runner, _ = make_core(hold=True)
    target = make_core(num_blocks=12, max_num_sequences=8)
    specs = [make_spec(f"r{i}", prompt=range(i, i + 8), max_tokens=26, temperature=1.0, seed=i) for i in range(5)]
    first = {spec.request_id: hand_over(spec, (prefill_core, prefill_runner), target).token_id for spec in specs}
    collected = drain(target[0])
    for spec in specs:
        tokens, finish = generate_alone(spec)
        assert [first[spec.request_id], *collected.tokens[spec.request_id]] == tokens
        assert collected.finish[spec.request_id] == finish
    assert collected.prefilled == []
    assert target[2].num_free == 12


def test_the_newest_of_the_lowest_priority_is_preempted() -> None:
    core, runner, _ = make_core(num_blocks=8)
    for name, priority in (("low-old", 0), ("low-new", 0), ("high", 1)):
        core.add(make_spec(name, prompt=range(4), max_tokens=12, priority=priority))
    drain(core)
    starts = [chunk[0] for plan in runner.plans for chunk in plan if chunk[1] == 0]
    assert starts.count("high") == 1
    assert starts.count("low-old") == 1
    assert starts.count("low-new") > 1


def share_prompt(core: EngineCore, name: str, *, prompt: range, priority: int = 0) -> SequenceSpec:
    """Add a sequence that was prefilled elsewhere, with blocks for its prompt all of which are known here."""
    spec = make_spec(name, prompt=prompt, max_tokens=6, priority=priority)
    chain = PrefixHasher("fake", block_size=BLOCK_SIZE).chain(prompt)
    table = core.pool.allocate(len(chain.hashes), owner="intake", prefix=chain.hashes)
    assert table.num_shared == len(table)
    core.add_prefilled(spec, table, ProducedToken(token_id=greedy_continuation(list(prompt), 1)[0]), hashes=chain)
    return spec


def test_a_sequence_whose_blocks_are_all_shared_is_not_preempted_in_vain() -> None:
    core, _, pool = make_core(num_blocks=16, max_tokens_per_step=20, caches=True)
    specs = [
        make_spec("best", prompt=range(12), max_tokens=12, priority=2),
        make_spec("own", prompt=range(50, 57), max_tokens=12, priority=1),
    ]
    for spec in specs:
        core.add(spec)
    collected = Collected()
    for _ in range(5):
        collected.take(core.step())  # "best" then has four full blocks
    shares = share_prompt(core, "shares", prompt=range(12))
    reservation = pool.allocate(pool.num_free, owner="reservation")
    output = core.step()
    assert output.preempted == ("own",)
    assert {chunk.request_id for chunk in output.chunks} == {"best", "shares"}
    collected.take(output)
    reservation.release()
    drain(core, collected)
    for spec in specs:
        assert collected.tokens[spec.request_id] == generate_alone(spec)[0]
    assert collected.tokens["shares"] == generate_alone(shares)[0][1:]
    assert pool.num_free == 16


def test_sequences_that_share_all_they_have_with_one_another_are_preempted_together() -> None:
    """Alone neither of them frees anything; if neither went, the best-ranked one would wait for blocks forever."""
    core, _, pool = make_core(num_blocks=16, max_tokens_per_step=20, caches=True)
    core.add(make_spec("publisher", prompt=range(12), max_tokens=1))
    best = make_spec("best", prompt=range(50, 58), max_tokens=4, priority=1)
    collected = Collected()
    collected.take(core.step())
    core.add(best)
    collected.take(core.step())
    shares = [share_prompt(core, name, prompt=range(12)) for name in ("one", "two")]
    reservation = pool.allocate(pool.num_free, owner="reservation")
    output = core.step()
    assert output.preempted == ("two", "one")
    collected.take(output)
    drain(core, collected)  # with the reservation as it is
    reservation.release()
    assert collected.tokens["best"] == generate_alone(best)[0]
    for spec in shares:
        assert collected.tokens[spec.request_id] == generate_alone(spec)[0][1:]
    assert pool.num_free == 16


def test_nobody_is_preempted_while_all_of_worse_rank_free_too_little() -> None:
    core, _, pool = make_core(num_blocks=16, max_tokens_per_step=20, caches=True)
    best = make_spec("best", prompt=range(12), max_tokens=8, priority=1)
    core.add(best)
    collected = Collected()
    collected.take(core.step())
    shares = share_prompt(core, "shares", prompt=range(12))
    reservation = pool.allocate(pool.num_free, owner="reservation")
    for _ in range(3):
        output = core.step()
        assert not output.preempted
        assert output.num_computed_tokens == 0
    reservation.release()
    drain(core, collected)
    assert collected.tokens["best"] == generate_alone(best)[0]
    assert collected.tokens["shares"] == generate_alone(shares)[0][1:]


def test_higher_priority_is_served_first() -> None:
    core, _, _ = make_core(max_num_sequences=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1)):
        core.add(make_spec(name, max_tokens=2, priority=priority))
    assert drain(core).finished == ["c", "a", "b", "d"]


def test_a_lone_sequence_that_outgrows_the_pool_fails() -> None:
    core, _, pool = make_core(num_blocks=3)
    core.add(make_spec("r", prompt=range(10), max_tokens=20))
    collected = drain(core)
    assert isinstance(collected.errors["r"], KvExhausted)
    assert collected.tokens["r"] == greedy_continuation(list(range(10)), 3)  # positions 10 and 11 fit, 12 does not
    assert pool.num_free == 3


def test_a_prompt_larger_than_the_pool_fails_at_once() -> None:
    core, runner, _ = make_core(num_blocks=3)
    core.add(make_spec("r", prompt=[1] * 13))
    core.add(make_spec("s", max_tokens=2))
    collected = drain(core)
    assert isinstance(collected.errors["r"], KvExhausted)
    assert len(collected.tokens["s"]) == 2
    assert all(chunk[0] == "s" for plan in runner.plans for chunk in plan)


def test_a_prompt_waits_for_blocks_that_others_hold() -> None:
    core, _, pool = make_core(num_blocks=4)
    other = pool.allocate(2, owner="reservation")
    core.add(make_spec("r", prompt=range(12), max_tokens=3))
    for _ in range(3):
        assert core.step().num_computed_tokens == 0
    assert core.has_work
    assert core.load().wanted_blocks == 3
    other.release()
    assert drain(core).tokens["r"] == greedy_continuation(list(range(12)), 3)


def test_a_decoding_sequence_waits_with_its_blocks_while_others_hold_the_rest() -> None:
    core, runner, pool = make_core(num_blocks=4)
    core.add(make_spec("r", prompt=range(3), max_tokens=8))
    core.step()
    other = pool.allocate(3, owner="reservation")
    core.step()
    for _ in range(3):
        output = core.step()
        assert output.is_empty
        assert output.num_computed_tokens == 0
    other.release()
    drain(core)
    assert sum(chunk[1] == 0 for plan in runner.plans for chunk in plan) == 1, "nothing was computed again"


def test_a_newcomer_leaves_room_to_grow() -> None:
    core, runner, _ = make_core(num_blocks=5)
    core.add(make_spec("old", prompt=range(8), max_tokens=8))
    core.step()
    core.add(make_spec("new", prompt=range(12), max_tokens=2))  # would take all that is free
    core.step()
    core.step()
    assert core.load().waiting == 1
    assert core.pool.num_free == 2
    drain(core)
    assert sum(chunk[0] == "new" and chunk[1] == 0 for plan in runner.plans for chunk in plan) == 1


def test_nobody_overtakes_a_sequence_that_waits_for_blocks() -> None:
    core, runner, pool = make_core(num_blocks=6)
    other = pool.allocate(3, owner="reservation")
    core.add(make_spec("large", prompt=range(16), max_tokens=1))
    core.add(make_spec("small", prompt=range(2), max_tokens=1))
    assert core.step().num_computed_tokens == 0
    other.release()
    drain(core)
    assert runner.plans[0][0][0] == "large"


# --- aborts and failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("hold", [False, True])
def test_abort_in_every_state(steps: int, hold: bool) -> None:
    core, _, pool = make_core(max_tokens_per_step=4, hold=hold)
    core.add(make_spec("other", prompt=range(3), max_tokens=10))
    core.add(make_spec("r", prompt=range(10), max_tokens=10))
    collected = Collected()
    for _ in range(steps):
        collected.take(core.step())
    assert core.abort(R)
    assert not core.abort(R)
    pool.check_integrity()
    tokens_before = list(collected.tokens.get("r", []))
    drain(core, collected)
    assert collected.tokens.get("r", []) == tokens_before
    assert "r" not in collected.finish
    core.release(RequestId("other"))
    assert pool.num_free == pool.num_blocks
    core.add(make_spec("r", max_tokens=2))
    assert drain(core).tokens["r"] == greedy_continuation([1, 2, 3], 1 if hold else 2)


@pytest.mark.parametrize("ending", ["failure", "abort"])
def test_blocks_that_others_may_read_stay_when_a_held_engine_ends_a_sequence(ending: str) -> None:
    core, runner, pool = make_core(max_tokens_per_step=4, hold=True)
    core.add(make_spec("r", prompt=range(10)))
    core.step()
    if ending == "failure":
        runner.fail_next = RuntimeError("bang")
        assert core.step().failed
    else:
        assert core.abort(R, keep_blocks=True)
        assert not core.abort(R, keep_blocks=True)
    assert pool.num_free == pool.num_blocks - 3
    assert not core.has_work
    with pytest.raises(AlreadyExists):
        core.add(make_spec("r"))
    core.abort(R)
    assert pool.num_free == pool.num_blocks


def test_abort_of_a_preempted_sequence() -> None:
    core, _, pool = make_core(num_blocks=8)
    for name in ("a", "b", "c"):
        core.add(make_spec(name, prompt=range(4), max_tokens=12))
    collected = Collected()
    for _ in range(50):
        collected.take(core.step())
        if core.load().waiting and "c" in collected.tokens:
            break
    assert core.load().waiting == 1
    assert core.abort(RequestId("c"))
    drain(core, collected)
    for name in ("a", "b"):
        assert collected.tokens[name] == greedy_continuation(list(range(4)), 12)
    assert pool.num_free == 8


@pytest.mark.parametrize("error", [RuntimeError("boom"), InternalError("known")])
def test_a_failing_step_fails_its_sequences_only(error: Exception) -> None:
    core, runner, pool = make_core(max_num_sequences=2, max_tokens_per_step=4)
    for name in ("a", "b", "c"):
        core.add(make_spec(name, prompt=range(4), max_tokens=4))
    core.step()
    core.step()
    runner.fail_next = error
    collected = drain(core)
    assert set(collected.errors) == {"a", "b"}
    expected = ComputeFailed if isinstance(error, RuntimeError) else InternalError
    assert all(isinstance(failure, expected) for failure in collected.errors.values())
    assert collected.tokens["c"] == greedy_continuation(list(range(4)), 4)
    assert pool.num_free == pool.num_blocks
    core.add(make_spec("a"))
    assert "a" in drain(core).finish


def test_a_runner_with_the_wrong_number_of_rows_is_noticed() -> None:
    class Short(FakeRunner):
        def run(self, plan: StepPlan) -> NDArray[np.float32]:
            return super().run(plan)[:0]

    pool = BlockPool(8)
    config = EngineConfig(max_num_sequences=2, max_tokens_per_step=8, max_model_len=50, block_size=BLOCK_SIZE)
    core = EngineCore(Short(pool), pool, config)
    core.add(make_spec("r"))
    assert isinstance(drain(core).errors["r"], ComputeFailed)
    assert pool.num_free == 8


def test_bad_logits_fail_their_row_only() -> None:
    class Poisoned(FakeRunner):
        def run(self, plan: StepPlan) -> NDArray[np.float32]:
            logits = super().run(plan)
            sampling = [chunk.sequence.request_id for chunk in plan.chunks if chunk.samples]
            if "bad" in sampling:
                logits[sampling.index(RequestId("bad")), 3] = float("nan")
            return logits

    pool = BlockPool(8)
    config = EngineConfig(max_num_sequences=2, max_tokens_per_step=8, max_model_len=50, block_size=BLOCK_SIZE)
    core = EngineCore(Poisoned(pool), pool, config)
    core.add(make_spec("bad"))
    core.add(make_spec("good"))
    collected = drain(core)
    assert isinstance(collected.errors["bad"], ComputeFailed)
    assert collected.tokens["good"] == greedy_continuation([1, 2, 3], 8)
    assert pool.num_free == 8


def test_fail_all_and_abort_all_free_everything() -> None:
    for hold in (False, True):
        core, _, pool = make_core(max_num_sequences=1, hold=hold)
        for name in ("a", "b", "c"):
            core.add(make_spec(name, prompt=range(6)))
        core.step()
        output = core.fail_all(InternalError("bug"))
        assert {failure.request_id for failure in output.failed} == {"a", "b", "c"}
        for name in ("a", "b", "c"):
            core.abort(RequestId(name))
        assert pool.num_free == pool.num_blocks
        core.add(make_spec("a", prompt=[]))
        core.add(make_spec("b"))
        core.abort_all()
        assert not core.has_work
        assert pool.num_free == pool.num_blocks


# --- stats and load ----------------------------------------------------------------------------------


def test_times_and_computed_tokens() -> None:
    now = [100.0]

    class Slow(FakeRunner):
        def run(self, plan: StepPlan) -> NDArray[np.float32]:
            now[0] += 2.0
            return super().run(plan)

    config = EngineConfig(max_num_sequences=2, max_tokens_per_step=8, max_model_len=50, block_size=BLOCK_SIZE)
    pool = BlockPool(16)
    runner = Slow(pool)
    core = EngineCore(runner, pool, config, clock=lambda: now[0])
    core.add(make_spec("r", prompt=range(10), max_tokens=4, resumed=[3]))
    now[0] += 1.0
    outputs = [core.step() for _ in range(4)]
    (prefilled,), (finished,) = outputs[1].prefilled, outputs[3].finished
    assert (prefilled.queue_s, prefilled.prefill_s, prefilled.decode_s) == (1.0, 4.0, 0.0)
    assert prefilled.computed_prompt_tokens == 10
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (1.0, 4.0, 4.0)

    table = pool.allocate(1, owner="intake")
    runner.write(table.block_ids, [1, 2, 3], start=0, end=3)
    core.add_prefilled(make_spec("p", max_tokens=3), table, ProducedToken(token_id=4))
    now[0] += 3.0
    core.step()
    (finished,) = core.step().finished
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (3.0, 0.0, 4.0)
    assert finished.computed_prompt_tokens == 0


def test_load_counts() -> None:
    core, _, _ = make_core(max_num_sequences=2, max_tokens_per_step=4)
    for name in ("a", "b", "c"):
        core.add(make_spec(name, prompt=range(6), max_tokens=3))
    load = core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.finished) == (0, 3, 18, 0)
    core.step()
    load = core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.wanted_blocks) == (2, 1, 14, 2)
    drain(core)
    load = core.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.finished, load.wanted_blocks) == (0, 0, 0, 3, 0)


@pytest.mark.parametrize("name", ["max_num_sequences", "max_tokens_per_step", "max_model_len", "block_size"])
def test_limits_must_be_positive(name: str) -> None:
    values = dict.fromkeys(("max_num_sequences", "max_tokens_per_step", "max_model_len", "block_size"), 1)
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{**values, name: 0})


# --- anything in any order ---------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_any_order_of_adds_aborts_and_steps(data: st.DataObject) -> None:
    random = Random(data.draw(st.integers(0, 1 << 32)))
    num_blocks = data.draw(st.integers(8, 24))
    core, runner, pool = make_core(
        num_blocks=num_blocks,
        max_num_sequences=data.draw(st.integers(1, 6)),
        max_tokens_per_step=data.draw(st.integers(1, 12)),
        max_model_len=32,  # 8 blocks
    )
    source = make_core(hold=True, max_model_len=32)
    collected, specs, aborted = Collected(), {}, set()
    first: dict[str, int] = {}
    reservations = []
    for number in range(data.draw(st.integers(5, 40))):
        action = random.choice(
            ["add", "add", "prefilled", "abort", "reserve", "return", "step", "step", "step", "step"]
        )
        if action in ("add", "prefilled") and len(specs) < 12:
            name = f"r{number}"
            spec = make_spec(
                name,
                prompt=[random.randrange(VOCAB) for _ in range(random.randint(1, 20))],
                max_tokens=random.randint(2, 20),
                temperature=random.choice([0.0, 1.0]),
                seed=number,
                priority=random.randint(-1, 1),
                stop=[random.randrange(VOCAB)],
                min_tokens=1,
            )
            if action == "add":
                core.add(spec)
                specs[name] = spec
            elif pool.num_free >= blocks_for(len(spec.prompt_token_ids), block_size=BLOCK_SIZE):
                first[name] = hand_over(spec, source[:2], (core, runner, pool)).token_id
                specs[name] = spec
        elif action == "abort" and specs:
            name = random.choice(sorted(specs))
            if core.abort(RequestId(name)):
                aborted.add(name)
        elif action == "reserve" and pool.num_free > 2:
            reservations.append(pool.allocate(random.randint(1, 2), owner="reservation"))
        elif action == "return" and reservations:
            reservations.pop().release()
        else:
            collected.take(core.step())
        pool.check_integrity()
    for table in reservations:
        table.release()
    drain(core, collected)
    assert pool.num_free == num_blocks
    for name, spec in specs.items():
        tokens, finish = generate_alone(spec, max_model_len=32)
        got = ([first[name]] if name in first else []) + collected.tokens.get(name, [])
        if name in aborted:
            assert got == tokens[: len(got)]
            assert name not in collected.finish
        else:
            assert (got, collected.finish[name]) == (tokens, finish)
    assert not collected.errors
