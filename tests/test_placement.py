"""Placement: a pure function, so its rules are tested one by one; and the ledger that feeds it."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ledger import Ledger
from router.placement import Candidate, Demand, Pair, Refusal, Snapshot, WorkerKey, place
from twinstage.types import WorkerId, WorkerLoad


def key(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), 1)


def prefill(name: str, *, waiting_tokens: int = 0, running: int = 0) -> Candidate:
    return Candidate(key=key(name), waiting_tokens=waiting_tokens, running=running)


def decode(name: str, *, running: int = 0, free: int = 100, total: int = 100) -> Candidate:
    return Candidate(key=key(name), running=running, free_blocks=free, total_blocks=total, block_size=16)


DEMAND = Demand(num_tokens=40)  # three blocks of 16 tokens


def test_fewest_waiting_prompt_tokens_wins() -> None:
    snapshot = Snapshot(
        prefill=(prefill("p0", waiting_tokens=9), prefill("p1", waiting_tokens=3)), decode=(decode("d"),)
    )
    assert place(DEMAND, snapshot) == Pair(prefill=key("p1"), decode=key("d"))


def test_equal_queues_go_by_running_requests() -> None:
    snapshot = Snapshot(prefill=(prefill("p0", running=2), prefill("p1", running=1)), decode=(decode("d"),))
    assert place(DEMAND, snapshot) == Pair(prefill=key("p1"), decode=key("d"))


def test_decode_worker_with_room_wins_over_an_idle_one_without() -> None:
    workers = (decode("d0", running=0, free=2), decode("d1", running=5, free=3))
    assert place(DEMAND, Snapshot(prefill=(prefill("p"),), decode=workers)) == Pair(prefill=key("p"), decode=key("d1"))


def test_room_is_needed_only_for_what_a_decode_worker_lacks() -> None:
    workers = (decode("d0", running=0, free=1), decode("d1", running=5, free=3))
    snapshot = Snapshot(prefill=(prefill("p"),), decode=workers)
    for held, chosen in ((31, "d1"), (32, "d0")):  # of the three blocks, one or two
        demand = Demand(num_tokens=40, held_tokens={key("d0"): held})
        assert place(demand, snapshot) == Pair(prefill=key("p"), decode=key(chosen))


def test_fewest_sequences_wins_among_those_with_room() -> None:
    workers = (decode("d0", running=3), decode("d1", running=2, free=50))
    assert place(DEMAND, Snapshot(prefill=(prefill("p"),), decode=workers)) == Pair(prefill=key("p"), decode=key("d1"))


def test_equals_take_turns() -> None:
    snapshot = Snapshot(prefill=(prefill("p0"), prefill("p1")), decode=(decode("d0"), decode("d1"), decode("d2")))
    pairs = [place(DEMAND, snapshot, turn=turn) for turn in range(6)]
    assert Counter(pair.prefill.worker_id for pair in pairs if isinstance(pair, Pair)) == {"p0": 3, "p1": 3}
    assert Counter(pair.decode for pair in pairs if isinstance(pair, Pair)) == {key(f"d{i}"): 2 for i in range(3)}


def test_one_token_takes_no_decode_worker() -> None:
    demand = Demand(num_tokens=40, needs_decode=False)
    assert place(demand, Snapshot(prefill=(prefill("p"),), decode=())) == Pair(prefill=key("p"), decode=None)


def test_excluded_workers_are_never_chosen() -> None:
    snapshot = Snapshot(prefill=(prefill("p0"), prefill("p1", waiting_tokens=999)), decode=(decode("d"),))
    assert place(DEMAND, snapshot, excluded=frozenset({key("p0")})) == Pair(prefill=key("p1"), decode=key("d"))
    everyone = frozenset({key("p0"), key("p1")})
    assert place(DEMAND, snapshot, excluded=everyone) is Refusal.NO_PREFILL_WORKER
    assert place(DEMAND, snapshot, excluded=frozenset({key("d")})) is Refusal.NO_DECODE_WORKER


def test_avoided_workers_are_the_last_resort() -> None:
    snapshot = Snapshot(prefill=(prefill("p0"), prefill("p1", waiting_tokens=999)), decode=(decode("d"),))
    avoided = frozenset({key("p0"), key("d")})
    assert place(DEMAND, snapshot, avoided=avoided) == Pair(prefill=key("p1"), decode=key("d"))


def test_another_epoch_is_another_worker() -> None:
    restarted = WorkerKey(WorkerId("p"), 2)
    snapshot = Snapshot(prefill=(Candidate(key=restarted),), decode=(decode("d"),))
    assert place(DEMAND, snapshot, excluded=frozenset({key("p")})) == Pair(prefill=restarted, decode=key("d"))


@pytest.mark.parametrize(("total", "fits"), [(2, False), (3, True)])
def test_prompt_that_no_pool_can_hold_is_refused(total: int, fits: bool) -> None:
    snapshot = Snapshot(prefill=(prefill("p"),), decode=(decode("d", total=total, free=0),))
    assert (place(DEMAND, snapshot) is not Refusal.TOO_LARGE) == fits


def test_without_workers_the_refusal_says_which() -> None:
    assert place(DEMAND, Snapshot(prefill=(), decode=())) is Refusal.NO_PREFILL_WORKER
    assert place(DEMAND, Snapshot(prefill=(prefill("p"),), decode=())) is Refusal.NO_DECODE_WORKER


@given(
    loads=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), min_size=1, max_size=5),
    excluded=st.sets(st.integers(0, 4)),
    turn=st.integers(0, 100),
)
def test_choice_is_never_excluded_and_never_beaten(loads: list[tuple[int, int]], excluded: set[int], turn: int) -> None:
    workers = tuple(decode(f"d{i}", running=running, free=free) for i, (running, free) in enumerate(loads))
    out = frozenset(key(f"d{i}") for i in excluded)
    choice = place(DEMAND, Snapshot(prefill=(prefill("p"),), decode=workers), excluded=out, turn=turn)
    able = [worker for worker in workers if worker.key not in out]
    if not able:
        assert choice is Refusal.NO_DECODE_WORKER
        return
    assert isinstance(choice, Pair)
    chosen = next(worker for worker in able if worker.key == choice.decode)
    for other in able:
        if (other.free_blocks >= 3) >= (chosen.free_blocks >= 3):
            assert other.running >= chosen.running or other.free_blocks < 3


def test_ledger_counts_what_reports_cannot_show_yet() -> None:
    ledger, load = Ledger(), WorkerLoad(running=1, waiting_tokens=10, free_kv_blocks=50)
    with ledger.placed(tokens=7, blocks=3):
        assert (ledger.sequences(load), ledger.waiting_tokens(load), ledger.free_blocks(load, 60)) == (2, 17, 47)
        ledger.report_arrived()
        later = WorkerLoad(running=2, waiting_tokens=17, free_kv_blocks=47)
        assert (ledger.sequences(later), ledger.waiting_tokens(later), ledger.free_blocks(later, 60)) == (2, 17, 47)
    assert (ledger.sequences(load), ledger.waiting_tokens(load), ledger.free_blocks(load, 60)) == (1, 10, 50)


def test_ledger_does_not_believe_reports_that_forget_its_own_requests() -> None:
    ledger, idle = Ledger(), WorkerLoad(free_kv_blocks=60)
    with ledger.placed(tokens=7, blocks=3), ledger.placed(tokens=5, blocks=2):
        ledger.report_arrived()
        assert (ledger.sequences(idle), ledger.waiting_tokens(idle), ledger.free_blocks(idle, 60)) == (2, 12, 55)


def test_ledger_of_a_placement_that_ends_before_the_next_report() -> None:
    ledger, load = Ledger(), WorkerLoad(free_kv_blocks=60)
    with ledger.placed(blocks=3):
        pass
    assert ledger.free_blocks(load, 60) == 60


def test_ledger_counts_shared_blocks_of_a_grant_once() -> None:
    """Ten requests share 6 of 7 blocks: they hold 16 blocks, not 70."""
    ledger, total = Ledger(), 60
    with contextlib.ExitStack() as scope:
        placements = [scope.enter_context(ledger.placed(blocks=7)) for _ in range(10)]
        assert ledger.free_blocks(WorkerLoad(free_kv_blocks=total), total) == 0
        for index, placement in enumerate(placements):
            placement.granted(1 if index else 7)
        assert ledger.free_blocks(WorkerLoad(free_kv_blocks=total), total) == 44
        ledger.report_arrived()
        assert ledger.free_blocks(WorkerLoad(free_kv_blocks=44), total) == 44
        with ledger.placed(blocks=7) as late:
            ledger.report_arrived()
            late.granted(1)  # the reports have it, or will
            assert ledger.free_blocks(WorkerLoad(free_kv_blocks=43), total) == 43
    assert ledger.free_blocks(WorkerLoad(free_kv_blocks=total), total) == total
