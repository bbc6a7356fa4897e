"""What the two schedulers decide, without an engine around them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from fake_runner import BLOCK_SIZE, make_spec
from twinstage.engine.decode_scheduler import DecodeScheduler
from twinstage.engine.prefill_scheduler import SCORED_PER_STEP, PrefillScheduler
from twinstage.engine.sequence import Sequence
from twinstage.kv.block_pool import BlockPool
from twinstage.types import SECONDS_PER_PRIORITY_LEVEL


def make_sequence(
    pool: BlockPool, arrival: int, *, tokens: int, computed: int = 0, priority: int = 0, arrived_s: float = 0.0
) -> Sequence:
    """One with `tokens` known tokens; when `computed`, it has the blocks for them."""
    num_blocks = -(-computed // BLOCK_SIZE)
    return Sequence(
        spec=make_spec(f"s{arrival}", prompt=range(tokens), priority=priority),
        table=pool.allocate(num_blocks, owner=f"s{arrival}"),
        arrival=arrival,
        arrived_s=arrived_s,
        num_computed_tokens=computed,
    )


def make_prefill(
    pool: BlockPool, *, chunk_size: int = 8, rows: int = 4, decodes_here: bool = True, fixed_passes: bool = False
) -> PrefillScheduler:
    return PrefillScheduler(
        pool,
        block_size=BLOCK_SIZE,
        chunk_size=chunk_size,
        max_num_sequences=rows,
        decodes_here=decodes_here,
        fixed_passes=fixed_passes,
    )


def lengths(chunks: list[object]) -> list[tuple[str, int, int, bool]]:
    return [(c.sequence.request_id, c.start, c.length, c.samples) for c in chunks]  # type: ignore[attr-defined]


def test_sequences_are_ranked_by_priority_then_arrival() -> None:
    pool = BlockPool(8)
    scheduler = make_prefill(pool)
    for arrival, priority in ((0, 0), (1, 2), (2, -1), (3, 2)):
        scheduler.add(make_sequence(pool, arrival, tokens=1, priority=priority))
    assert [sequence.arrival for sequence in scheduler.waiting] == [1, 3, 0, 2]


def test_a_step_has_logits_of_so_many_prompt_tokens_and_no_more() -> None:
    """Of all prompts whose log probabilities are wanted together: each row has the whole vocabulary."""
    pool = BlockPool(100)
    scheduler = make_prefill(pool, chunk_size=512)
    for arrival in range(3):
        sequence = make_sequence(pool, arrival, tokens=100)
        sequence.spec = replace(sequence.spec, prompt_logprobs=5 if arrival else None)
        scheduler.add(sequence)
    scheduler.admit(decoding=[])
    chunks = scheduler.schedule(max_chunks=4)
    assert lengths(chunks) == [("s0", 0, 100, True), ("s1", 0, SCORED_PER_STEP, False)]  # type: ignore[arg-type]
    assert [chunk.num_logits for chunk in chunks] == [1, SCORED_PER_STEP]


def test_a_level_of_priority_is_worth_some_seconds_and_no_more() -> None:
    """Else a sequence would wait for ever behind higher priorities that keep coming."""
    pool = BlockPool(8)
    scheduler = make_prefill(pool)
    scheduler.add(make_sequence(pool, 0, tokens=1))
    for arrival, late_s in ((1, 0.9), (2, 1.1)):
        arrived_s = late_s * SECONDS_PER_PRIORITY_LEVEL
        scheduler.add(make_sequence(pool, arrival, tokens=1, priority=1, arrived_s=arrived_s))
    assert [sequence.arrival for sequence in scheduler.waiting] == [1, 0, 2]


def test_one_that_waits_for_blocks_lets_smaller_ones_pass_until_they_have_had_its_share() -> None:
    pool = BlockPool(8)
    scheduler = make_prefill(pool, decodes_here=False, rows=99)
    holder, large = make_sequence(pool, 0, tokens=20), make_sequence(pool, 1, tokens=16)  # five blocks, and four
    for sequence in (holder, large):
        scheduler.add(sequence)
    passed = 0
    for arrival in range(2, 9):
        small = make_sequence(pool, arrival, tokens=5)
        scheduler.add(small)
        scheduler.admit(decoding=[])
        if small in scheduler.prefilling:
            passed += 1
            scheduler.remove(small)
            small.table.release()
    assert passed == 2  # of two blocks each
    assert scheduler.waiting[0] is large
    scheduler.remove(holder)
    holder.table.release()
    scheduler.admit(decoding=[])
    assert scheduler.prefilling[0] is large
    assert len(scheduler.prefilling) == 3  # and with it those that fit beside it


def test_a_long_prompt_lets_short_ones_wait_for_one_chunk_and_not_for_all() -> None:
    pool = BlockPool(64)
    scheduler = make_prefill(pool, chunk_size=8, rows=9)
    tokens = {0: 40, 1: 3, 2: 4, 3: 20, 4: 2}
    for arrival, number in tokens.items():
        scheduler.add(make_sequence(pool, arrival, tokens=number, priority=-1 if arrival == 4 else 0))
    order = []
    scheduler.admit(decoding=[])
    while scheduler.prefilling:
        chunks = scheduler.schedule(max_chunks=4)
        order.append([chunk.sequence.arrival for chunk in chunks])
        for chunk in chunks:
            chunk.sequence.mark_computed(chunk.start + chunk.length)
            if chunk.samples:
                scheduler.remove(chunk.sequence)
        scheduler.admit(decoding=[])
    assert order == [[0], [1, 2], [0], [0], [0], [0], [3], [3], [3, 4]]


def test_admission_gives_all_blocks_of_the_prompt_and_stops_at_the_first_that_does_not_fit() -> None:
    pool = BlockPool(8)
    scheduler = make_prefill(pool)
    first, second, third = (make_sequence(pool, i, tokens=tokens) for i, tokens in enumerate((20, 13, 1)))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    scheduler.admit(decoding=[])
    assert scheduler.prefilling == [first]
    assert scheduler.waiting == [second, third]
    assert (len(first.table), len(second.table), len(third.table)) == (5, 0, 0)
    assert scheduler.wanted_blocks == 4


def test_admission_leaves_a_block_for_each_that_grows() -> None:
    for free, admitted in ((3, False), (4, True)):
        pool = BlockPool(2 + free)
        scheduler = make_prefill(pool)
        decoding = [make_sequence(pool, i, tokens=5, computed=4) for i in range(2)]
        newcomer = make_sequence(pool, 9, tokens=8)
        scheduler.add(newcomer)
        scheduler.admit(decoding=decoding)
        assert (newcomer in scheduler.prefilling) is admitted


def test_admission_stops_when_the_batch_is_full_of_better_ones() -> None:
    pool = BlockPool(32)
    decoding = [make_sequence(pool, i, tokens=5, computed=4) for i in (1, 2)]
    scheduler = make_prefill(pool, rows=2)
    scheduler.add(make_sequence(pool, 3, tokens=4))
    scheduler.admit(decoding=decoding)
    assert not scheduler.prefilling
    preempted = make_sequence(pool, 0, tokens=4)  # older than those that decode
    scheduler.add(preempted)
    scheduler.admit(decoding=decoding)
    assert scheduler.prefilling == [preempted]


def test_chunks_are_whole_and_within_the_budget() -> None:
    pool = BlockPool(32)
    scheduler = make_prefill(pool, chunk_size=8)
    for arrival, tokens in enumerate((11, 6, 5, 9)):
        scheduler.add(make_sequence(pool, arrival, tokens=tokens))
    scheduler.admit(decoding=[])
    assert lengths(scheduler.schedule(max_chunks=4)) == [("s0", 0, 8, False)]  # type: ignore[arg-type]
    scheduler.prefilling[0].mark_computed(8)
    assert lengths(scheduler.schedule(max_chunks=4)) == [("s0", 8, 3, True), ("s2", 0, 5, True)]  # type: ignore[arg-type]
    assert lengths(scheduler.schedule(max_chunks=1)) == [("s0", 8, 3, True)]  # type: ignore[arg-type]
    assert scheduler.schedule(max_chunks=0) == []
    assert scheduler.num_uncomputed_tokens == 3 + 6 + 5 + 9


def test_fixed_passes_end_at_the_chunk_size_and_at_the_prompt_and_replay_in_short_chunks() -> None:
    pool = BlockPool(32)
    scheduler = make_prefill(pool, chunk_size=16, fixed_passes=True)
    resumed = make_sequence(pool, 0, tokens=21)
    resumed.output_token_ids.extend(range(11))
    cached = make_sequence(pool, 1, tokens=40, computed=12)  # the first tokens need no computing
    for sequence, steps in (
        (resumed, [("s0", 0, 16, False), ("s0", 16, 5, False), ("s0", 21, 8, False), ("s0", 29, 3, True)]),
        (cached, [("s1", 12, 4, False), ("s1", 16, 16, False), ("s1", 32, 8, True)]),
    ):
        scheduler.prefilling = [sequence]
        for expected in steps:
            chunks = scheduler.schedule(max_chunks=4)
            assert lengths(chunks) == [expected]  # type: ignore[arg-type]
            sequence.mark_computed(chunks[0].end)


def test_decode_takes_the_best_ranked_and_leaves_places_to_prompts() -> None:
    pool = BlockPool(32)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=3)
    for arrival in (5, 1, 3, 4):
        scheduler.add(make_sequence(pool, arrival, tokens=4, computed=3))
    assert [c.sequence.arrival for c in scheduler.schedule(prefilling=[]).chunks] == [1, 3, 4]
    prefilling = [make_sequence(pool, 2, tokens=4)]
    assert [c.sequence.arrival for c in scheduler.schedule(prefilling=prefilling).chunks] == [1, 3]
    assert [c.sequence.arrival for c in scheduler.schedule(prefilling=[make_sequence(pool, 9, tokens=4)]).chunks] == [
        1,
        3,
        4,
    ]


def test_a_block_is_added_only_when_the_last_one_is_full() -> None:
    pool = BlockPool(4)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=3)
    partly, full = make_sequence(pool, 0, tokens=4, computed=3), make_sequence(pool, 1, tokens=5, computed=4)
    scheduler.add(partly)
    scheduler.add(full)
    scheduler.schedule(prefilling=[])
    assert (len(partly.table), len(full.table)) == (1, 2)


def test_the_worst_ranked_gives_its_blocks_even_when_it_is_a_prompt() -> None:
    pool = BlockPool(5)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=4)
    old = make_sequence(pool, 0, tokens=5, computed=4)
    middle = make_sequence(pool, 1, tokens=4, computed=3)
    prompt = make_sequence(pool, 2, tokens=12)
    prompt.table.grow(3)
    scheduler.add(old)
    scheduler.add(middle)
    decision = scheduler.schedule(prefilling=[prompt])
    assert decision.preempted == [prompt]
    assert [c.sequence for c in decision.chunks] == [old, middle]
    assert (len(old.table), len(prompt.table), pool.num_free) == (2, 0, 2)
    pool.check_integrity()


def test_the_worst_ranked_itself_waits_with_its_blocks() -> None:
    pool = BlockPool(3)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=4)
    old, new = make_sequence(pool, 0, tokens=5, computed=4), make_sequence(pool, 1, tokens=5, computed=4)
    scheduler.add(old)
    scheduler.add(new)
    decision = scheduler.schedule(prefilling=[])
    assert (decision.preempted, decision.impossible) == ([], [])
    assert [c.sequence for c in decision.chunks] == [old]
    assert (len(old.table), len(new.table)) == (2, 1)


def test_a_preempted_sequence_gets_no_chunk() -> None:
    pool = BlockPool(2)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=4)
    old, new = make_sequence(pool, 0, tokens=5, computed=4), make_sequence(pool, 1, tokens=4, computed=3)
    scheduler.add(new)
    scheduler.add(old)
    decision = scheduler.schedule(prefilling=[])
    assert decision.preempted == [new]
    assert [c.sequence for c in decision.chunks] == [old]


def test_what_outgrows_the_whole_pool_is_impossible() -> None:
    pool = BlockPool(2)
    scheduler = DecodeScheduler(pool, block_size=BLOCK_SIZE, max_num_sequences=4)
    sequence = make_sequence(pool, 0, tokens=9, computed=8)
    scheduler.add(sequence)
    decision = scheduler.schedule(prefilling=[])
    assert decision.impossible == [sequence]
    assert not decision.chunks


def test_the_schedulers_import_without_torch() -> None:
    modules = [
        "twinstage.kv.block_pool",
        "twinstage.kv.layout",
        "twinstage.kv.memory",
        "twinstage.engine.plan",
        "twinstage.engine.output",
        "twinstage.engine.prefill_scheduler",
        "twinstage.engine.decode_scheduler",
    ]
    code = f"import sys; import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
