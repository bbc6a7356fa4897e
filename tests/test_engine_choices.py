"""Several choices of one prompt in the engine: each is what it would be alone, and the prompt is computed once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_runner import BLOCK_SIZE, VOCAB, Collected, drain, generate_alone, make_core, make_spec
from twinstage.engine.choices import choice_id, choice_spec
from twinstage.engine.core import EngineCore
from twinstage.errors import InvalidRequest
from twinstage.kv.block_pool import BlockPool
from twinstage.types import FinishReason, RequestId, SequenceSpec

N = 4


def drawn(name: str = "r", **changes: object) -> SequenceSpec:
    """One of which no two choices are alike."""
    return make_spec(name, **{"temperature": 2.0, "seed": 3, "num_choices": N, **changes})  # type: ignore[arg-type]


def check_equal(spec: SequenceSpec, collected: Collected) -> None:
    for index in range(spec.num_choices):
        alone = choice_spec(spec, index)
        expected = generate_alone(alone)
        assert (collected.tokens[alone.request_id], collected.finish[alone.request_id]) == expected


@pytest.mark.parametrize("length", range(1, 2 * BLOCK_SIZE + 2))
def test_choices_are_those_computed_alone_and_share_the_prompt(length: int) -> None:
    spec = drawn(prompt=range(1, length + 1), max_tokens=9)
    core, runner, pool = make_core(max_num_sequences=8, max_tokens_per_step=64)
    core.add(spec)
    collected = drain(core)
    check_equal(spec, collected)
    assert len({tuple(tokens) for tokens in collected.tokens.values()}) == N
    assert sum(count for plan in runner.plans for _, _, count, _ in plan) == length + N * 8
    assert sorted(collected.finished) == sorted(choice_id(spec.request_id, index) for index in range(N))
    assert collected.prefilled == ["r"]
    assert pool.num_free == pool.num_blocks
    assert core.load().finished == N


def held_blocks(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_free


def stepped(core: EngineCore, collected: Collected) -> None:
    collected.take(core.step())
    core.pool.check_integrity()


@pytest.mark.parametrize(("length", "own"), [(8, 0), (9, 1), (11, 1)])
def test_complete_blocks_are_held_once_and_the_last_one_is_copied(length: int, own: int) -> None:
    core, _, pool = make_core(max_tokens_per_step=64, max_num_sequences=8)
    core.add(drawn(prompt=range(length), max_tokens=2))
    stepped(core, Collected())
    assert held_blocks(pool) == 2 + own * N
    drain(core)


def test_choices_that_end_with_their_first_token_leave_the_others_alone() -> None:
    firsts = [generate_alone(choice_spec(drawn(max_tokens=1), index))[0][0] for index in range(N)]
    assert len(set(firsts)) > 1
    for ending in set(firsts):
        spec = drawn(stop=[ending], max_tokens=7, prompt=[1, 2, 3])
        core, _, pool = make_core()
        core.add(spec)
        collected = drain(core)
        check_equal(spec, collected)
        assert pool.num_free == pool.num_blocks
    core, _, pool = make_core()
    core.add(drawn(max_tokens=1))
    assert {finish.reason for finish in drain(core).finish.values()} == {FinishReason.LENGTH}
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("victim", range(N))
def test_one_choice_is_aborted_and_the_others_go_on(victim: int) -> None:
    spec = drawn(prompt=range(10), max_tokens=12)
    core, _, pool = make_core(max_num_sequences=8, max_tokens_per_step=64)
    core.add(spec)
    collected = Collected()
    for _ in range(3):
        stepped(core, collected)
    before = held_blocks(pool)
    assert core.abort(choice_id(spec.request_id, victim))
    pool.check_integrity()
    assert before - held_blocks(pool) == 1, "its own block alone"
    drain(core, collected)
    for index in set(range(N)) - {victim}:
        alone = choice_spec(spec, index)
        assert collected.tokens[alone.request_id] == generate_alone(alone)[0]
    assert choice_id(spec.request_id, victim) not in collected.finish
    assert pool.num_free == pool.num_blocks


def test_preempted_choices_continue_as_if_nothing_had_happened() -> None:
    spec = drawn(prompt=range(9), max_tokens=20)
    other = make_spec("other", prompt=range(5), max_tokens=12)
    core, _, pool = make_core(num_blocks=11, max_num_sequences=8, max_tokens_per_step=64)
    core.add(spec)
    core.add(other)
    collected, preempted = Collected(), []
    while core.has_work:
        output = core.step()
        preempted += output.preempted
        collected.take(output)
        pool.check_integrity()
    check_equal(spec, collected)
    assert collected.tokens["other"] == generate_alone(other)[0]
    assert preempted
    assert pool.num_free == pool.num_blocks


def test_a_prompt_of_many_choices_waits_for_the_blocks_of_all() -> None:
    core, _, pool = make_core(num_blocks=8, max_num_sequences=8)
    table = pool.allocate(4, owner="somebody")
    core.add(drawn(prompt=range(6), max_tokens=2))  # two blocks, and three copies of the second one
    assert not core.step().num_computed_tokens
    table.release()
    check_equal(drawn(prompt=range(6), max_tokens=2), drain(core))
    core.add(drawn("large", prompt=range(30), max_tokens=2))
    assert "large" in drain(core).errors, "they never fit"


def test_a_held_prompt_reports_every_choice_and_needs_no_more_blocks() -> None:
    spec = drawn(prompt=range(6), max_tokens=5)
    core, _, pool = make_core(hold=True)
    core.add(spec)
    output = core.step()
    assert [(chunk.request_id, chunk.choice_index, chunk.finish) for chunk in output.chunks] == [
        ("r", index, None) for index in range(N)
    ]
    tokens = [chunk.tokens[0].token_id for chunk in output.chunks]
    assert tokens == [generate_alone(choice_spec(spec, index))[0][0] for index in range(N)]
    assert held_blocks(pool) == 2
    core.release(spec.request_id)
    assert pool.num_free == pool.num_blocks


def test_a_held_prompt_whose_choices_all_end_is_finished() -> None:
    core, _, pool = make_core(hold=True)
    core.add(drawn(max_tokens=1))
    output = core.step()
    assert [chunk.finish is not None for chunk in output.chunks] == [True] * N
    assert [stats.request_id for stats in output.finished] == ["r"]
    core.abort(RequestId("r"))
    assert pool.num_free == pool.num_blocks


def test_no_choices_are_refused() -> None:
    core, _, _ = make_core()
    core.add(drawn(num_choices=0))
    assert isinstance(drain(core).errors["r"], InvalidRequest)


# --- the prefix cache ---------------------------------------------------------------------------------


def test_the_prompt_and_each_answer_are_found_later() -> None:
    spec = drawn(prompt=range(10), max_tokens=8)
    core, runner, pool = make_core(caches=True, max_num_sequences=8, max_tokens_per_step=64)
    core.add(spec)
    collected = drain(core)
    for index in range(N):
        answer = collected.tokens[choice_id(spec.request_id, index)]
        runner.plans.clear()
        again = make_spec(f"again-{index}", prompt=[*range(10), *answer, 1], max_tokens=1)
        core.add(again)
        assert drain(core).tokens[again.request_id] == generate_alone(again)[0]
        # Of 18 tokens, the last one was never computed.
        assert runner.plans[0][0][1] == 16
    assert pool.num_free == pool.num_blocks


def test_a_prompt_that_is_known_is_shared_by_its_choices() -> None:
    first = make_spec("first", prompt=range(8), max_tokens=2)
    spec = drawn(prompt=range(10), max_tokens=3)
    core, runner, pool = make_core(caches=True, max_num_sequences=8, max_tokens_per_step=64)
    core.add(first)
    drain(core)
    runner.plans.clear()
    core.add(spec)
    check_equal(spec, drain(core))
    assert runner.plans[0] == [("r", 8, 2, True)]
    assert pool.num_free == pool.num_blocks


def test_what_choices_with_bad_logits_hold_is_not_found() -> None:
    spec = drawn(prompt=range(8), max_tokens=9, num_choices=2)
    core, runner, pool = make_core(caches=True, max_tokens_per_step=64)
    core.add(spec)
    collected = Collected()
    stepped(core, collected)
    run = runner.run
    runner.run = lambda plan: np.full((len(plan.chunks), VOCAB), np.nan, dtype=np.float32)  # type: ignore[method-assign]
    stepped(core, collected)
    runner.run = run  # type: ignore[method-assign]
    assert set(collected.errors) == {"r", "r/1"}
    assert (pool.num_cached, pool.num_free) == (0, pool.num_blocks)


# --- any order ----------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_adds_aborts_and_steps(data: st.DataObject) -> None:
    core, _, pool = make_core(
        num_blocks=data.draw(st.integers(10, 24)), max_num_sequences=5, caches=data.draw(st.booleans())
    )
    specs: list[SequenceSpec] = []
    aborted: set[str] = set()
    collected = Collected()
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "abort", "step", "step"]))
        if action == "add" and len(specs) < 5:
            length, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
            specs.append(drawn(f"s{number}", prompt=range(length), max_tokens=6, num_choices=count, seed=number))
            core.add(specs[-1])
        elif action == "abort" and specs:
            spec = data.draw(st.sampled_from(specs))
            name = choice_id(spec.request_id, data.draw(st.integers(0, spec.num_choices - 1)))
            # Before its first tokens the name of the first one is that of all.
            if core.abort(name):
                gone = {choice_id(spec.request_id, index) for index in range(spec.num_choices)}
                aborted |= {name} if set(collected.tokens) & gone else gone
        elif core.has_work:
            stepped(core, collected)
    drain(core, collected)
    for spec in specs:
        for index in range(spec.num_choices):
            alone = choice_spec(spec, index)
            if alone.request_id not in aborted:
                assert collected.tokens[alone.request_id] == generate_alone(alone)[0]
    assert pool.num_free == pool.num_blocks
