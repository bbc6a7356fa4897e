"""The gate: who is let in, who waits, and who is refused while there is time to go elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter

import pytest

from router.fair_queue import FairQueue, Waiter
from router.gate import Gate
from router.service_times import ServiceTimes
from twinstage.errors import Draining, Overloaded
from twinstage.types import SECONDS_PER_PRIORITY_LEVEL


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_gate_lets_so_many_in_and_the_next_when_one_leaves() -> None:
    gate = Gate(max_live=2, max_queued=2)
    async with gate.permit(deadline_s=now() + 5) as first_wait_s:
        assert first_wait_s == 0.0
        async with gate.permit(deadline_s=now() + 5):
            waiting = asyncio.create_task(_enter(gate, now() + 5))
            await asyncio.sleep(0)
            assert (gate.live, gate.queued) == (2, 1)
        await waiting
    assert (gate.live, gate.queued) == (0, 0)


async def _enter(
    gate: Gate, deadline_s: float, *, priority: int = 0, kind: str = "", log: list[int] | None = None
) -> None:
    async with gate.permit(deadline_s=deadline_s, priority=priority, kind=kind):
        if log is not None:
            log.append(priority)


async def test_gate_refuses_at_once_when_its_queue_is_full() -> None:
    gate = Gate(max_live=1, max_queued=1)
    async with gate.permit(deadline_s=now() + 5):
        waiting = asyncio.create_task(_enter(gate, now() + 5))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await _enter(gate, now() + 5)
        assert caught.value.retry_after_s > 0
    await waiting


async def test_gate_serves_higher_priority_first() -> None:
    gate, log = Gate(max_live=1, max_queued=9), list[int]()
    async with gate.permit(deadline_s=now() + 5):
        tasks = [asyncio.create_task(_enter(gate, now() + 5, priority=p, log=log)) for p in (0, 5, 0, 9)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert log == [9, 5, 0, 0]


async def test_gate_refuses_whose_turn_would_come_too_late() -> None:
    clock = [0.0]
    gate = Gate(max_live=1, max_queued=9, clock=lambda: clock[0])
    async with gate.permit(deadline_s=100):
        clock[0] = 10.0  # a request takes ten seconds
    assert gate.expected_wait_s(ahead=0) == 10.0
    async with gate.permit(deadline_s=100):
        with pytest.raises(Overloaded) as caught:
            await _enter(gate, 15.0)
        assert caught.value.retry_after_s == 10.0
        assert "beside the 1 in progress" in str(caught.value)


async def test_gate_gives_up_before_the_deadline_and_says_when_to_come_back() -> None:
    gate = Gate(max_live=1, max_queued=9)
    async with gate.permit(deadline_s=now() + 5):
        deadline_s = now() + 1.0
        with pytest.raises(Overloaded) as caught:
            await _enter(gate, deadline_s)
        assert now() < deadline_s
        assert caught.value.retry_after_s > 0
    assert (gate.live, gate.queued) == (0, 0)


async def test_gate_survives_cancelled_waiters() -> None:
    gate = Gate(max_live=1, max_queued=9)
    async with gate.permit(deadline_s=now() + 5):
        waiting = [asyncio.create_task(_enter(gate, now() + 5)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
    waiting[2].cancel()  # in the moment in which its turn has come
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (gate.live, gate.queued) == (0, 0)
    await _enter(gate, now() + 5)


async def test_closed_gate_refuses_everybody() -> None:
    gate = Gate(max_live=1, max_queued=9)
    async with gate.permit(deadline_s=now() + 5):
        waiting = asyncio.create_task(_enter(gate, now() + 5))
        await asyncio.sleep(0)
        gate.close()
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await _enter(gate, now() + 5)
    assert gate.live == 0


async def test_gate_refuses_who_would_wait_longer_than_anybody_may() -> None:
    clock = [now()]
    gate = Gate(max_live=1, max_queued=9, max_wait_s=2.5, clock=lambda: clock[0])
    async with gate.permit(deadline_s=clock[0] + 100):
        clock[0] += 1.0  # a request takes a second
    async with gate.permit(deadline_s=clock[0] + 100):
        waiting = [asyncio.create_task(_enter(gate, clock[0] + 100)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"3\.0 s, and nobody waits longer than 2\.5 s"):
            await _enter(gate, clock[0] + 100)
    await asyncio.gather(*waiting)


async def test_gate_lets_nobody_wait_longer_than_it_says_although_nothing_was_learned() -> None:
    gate = Gate(max_live=1, max_queued=9, max_wait_s=0.05)
    async with gate.permit(deadline_s=now() + 60):
        with pytest.raises(Overloaded):
            await _enter(gate, now() + 60)
    assert (gate.live, gate.queued) == (0, 0)


async def test_cancelled_waiters_leave_at_once_and_cost_no_turn() -> None:
    """A queue full of requests that were given up takes new ones, and a permit goes to those who still want it."""
    gate, served = Gate(max_live=1, max_queued=100), list[str]()

    async def call(caller: str) -> None:
        async with gate.permit(deadline_s=now() + 60, caller=caller):
            served.append(caller)

    async with gate.permit(deadline_s=now() + 60, caller="first"):
        given_up = [asyncio.create_task(call("impatient")) for _ in range(100)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert gate.queued == 0
        waiting = [asyncio.create_task(call("patient")) for _ in range(100)]
        await asyncio.sleep(0)
        assert gate.queued == 100
    await asyncio.gather(*waiting)
    assert served == ["patient"] * 100


# --- between callers ------------------------------------------------------------------------------


async def _served_in_order(gate: Gate, callers: Counter[str]) -> list[str]:
    """Let callers queue so many requests each behind one that holds the gate; who was served, in order."""
    served: list[str] = []

    async def call(caller: str) -> None:
        with contextlib.suppress(Overloaded):
            async with gate.permit(deadline_s=now() + 60, caller=caller):
                served.append(caller)
                await asyncio.sleep(0)

    async with gate.permit(deadline_s=now() + 60, caller=next(iter(callers))):
        tasks = [asyncio.create_task(call(caller)) for caller in callers.elements()]
        await asyncio.sleep(0)
        assert len(gate._queue) <= gate.max_queued
    await asyncio.gather(*tasks)
    assert (gate.live, gate.queued) == (0, 0)
    return served


async def test_a_call_of_many_continuations_counts_as_many_and_as_a_quarter_at_most() -> None:
    gate = Gate(max_live=8, max_queued=9)
    async with gate.permit(deadline_s=now() + 5, caller="batches", size=50):
        assert gate.live == 2
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(gate.permit(deadline_s=now() + 5))
            async with gate.permit(deadline_s=now() + 5, caller="batches", size=2):  # as there is any room
                assert gate.live == 9
                waiting = asyncio.create_task(_enter(gate, now() + 5))
                await asyncio.sleep(0)
                assert (gate.live, gate.queued) == (9, 1)
            await waiting
    assert (gate.live, gate.queued) == (0, 0)


def test_callers_share_permits_by_what_their_calls_take() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(12):
        queue.add(Waiter(caller="batches", priority=0, item="", size=4), now_s=0.0)
        queue.add(Waiter(caller="single", priority=0, item=""), now_s=0.0)
    assert queue.num_ahead("single", 0) == 12 + 13
    assert queue.num_ahead("somebody", 0) == 1 + 1
    taken: Counter[str] = Counter()
    while taken.total() < 20:
        waiter = queue.pop(now_s=0.0)
        assert waiter is not None
        queue.took(waiter.caller, waiter.size)
        taken[waiter.caller] += waiter.size
    assert abs(taken["batches"] - taken["single"]) <= 4
    pushed = queue.push_out(Waiter(caller="single", priority=0, item=""))
    assert pushed.caller == "batches"  # which has most of the queue, though not most of its calls


@pytest.mark.parametrize("max_live", [1, 4])
async def test_a_caller_with_a_thousand_requests_does_not_starve_one_with_a_single_one(max_live: int) -> None:
    started_s = now()  # however long this takes: a thousand times what the first one takes is long
    gate = Gate(max_live=max_live, max_queued=1001, clock=lambda: started_s)
    served = await _served_in_order(gate, Counter({"many": 1000, "one": 1}))
    assert served.index("one") < max_live + 1
    assert len(served) == 1001


async def test_a_full_queue_makes_room_for_callers_that_use_less_of_it() -> None:
    gate = Gate(max_live=1, max_queued=10)
    served = await _served_in_order(gate, Counter({"many": 1000, "few": 3, "one": 1}))
    assert Counter(served) == {"many": 6, "few": 3, "one": 1}
    assert served.index("one") < 3
    assert set(served[:6]) == {"many", "few", "one"}


def test_callers_share_permits_by_their_weights_whatever_their_requests_take() -> None:
    """Requests of "long" take four times as long: it holds as much as "short", and "heavy" the double."""
    queue: FairQueue[int] = FairQueue({"heavy": 2.0})
    takes = {"short": 1, "long": 4, "heavy": 1}
    for caller in takes:
        for _ in range(2000):
            queue.add(Waiter(caller=caller, priority=0, item=0), now_s=0.0)
    running: list[tuple[int, str]] = []
    held: Counter[str] = Counter()
    for tick in range(200):
        for ends, caller in [entry for entry in running if entry[0] == tick]:
            running.remove((ends, caller))
            queue.gave_back(caller)
        while len(running) < 16:
            waiter = queue.pop(now_s=0.0)
            assert waiter is not None
            queue.took(waiter.caller)
            running.append((tick + takes[waiter.caller], waiter.caller))
        held.update(caller for _, caller in running)
    assert held["heavy"] / held["short"] == pytest.approx(2.0, rel=0.1)
    assert held["long"] / held["short"] == pytest.approx(1.0, rel=0.1)


def test_priorities_come_first_and_none_starves() -> None:
    """Each second has a turn, and a new request of priority 1 for it; of priority 0 nine wait."""
    queue: FairQueue[int] = FairQueue()
    for _ in range(9):
        queue.add(Waiter(caller="a", priority=0, item=0), now_s=0.0)
    turns = []
    for second in range(60):
        queue.add(Waiter(caller="b", priority=1, item=1), now_s=float(second))
        waiter = queue.pop(now_s=float(second))
        assert waiter is not None
        turns.append(waiter.item)
    starved_for_s = [second for second, item in enumerate(turns) if item == 0]
    assert 0 < len(starved_for_s) <= 6
    assert starved_for_s[0] >= SECONDS_PER_PRIORITY_LEVEL - 1
    assert max(b - a for a, b in itertools.pairwise(starved_for_s)) <= SECONDS_PER_PRIORITY_LEVEL + 2


def test_the_fair_queue_remembers_nothing_of_callers_that_have_gone() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        waiter = Waiter(caller=f"caller-{number}", priority=number % 3, item=0)
        queue.add(waiter, now_s=0.0)
        if number % 2:
            assert queue.remove(waiter)
            assert not queue.remove(waiter)
        else:
            assert queue.pop(now_s=0.0) is waiter
            queue.took(waiter.caller)
            queue.gave_back(waiter.caller)
    assert (len(queue), queue._levels, queue._held, queue._last_turns) == (0, {}, {}, {})


def test_within_a_caller_a_newcomer_pushes_out_the_newest_of_lower_priority() -> None:
    queue: FairQueue[int] = FairQueue()
    for priority in (5, 0, 0):
        queue.add(Waiter(caller="many", priority=priority, item=0), now_s=0.0)
    for priority in (0, -1):
        equal_or_lower = Waiter(caller="many", priority=priority, item=1)
        assert queue.push_out(equal_or_lower) is equal_or_lower
    victim = queue.push_out(Waiter(caller="many", priority=1, item=1))
    assert (victim.priority, victim.number) == (0, 3)
    assert len(queue) == 2


def test_between_callers_no_priority_keeps_a_place_in_the_queue() -> None:
    """Whoever fills the queue with urgent requests loses the last of them to a caller that has less of it."""
    queue: FairQueue[int] = FairQueue({"heavy": 2.0})
    for caller, count in (("urgent", 4), ("heavy", 6)):
        for _ in range(count):
            queue.add(Waiter(caller=caller, priority=100, item=0), now_s=0.0)
    victims = []
    for _ in range(3):
        newcomer = Waiter(caller="other", priority=-100, item=1)
        victims.append(queue.push_out(newcomer))
        if victims[-1] is not newcomer:
            queue.add(newcomer, now_s=0.0)
    assert [(victim.caller, victim.number) for victim in victims[:2]] == [("urgent", 4), ("urgent", 3)]
    assert victims[2].caller == "other"  # of two places it has as much as the others for their weights
    assert len(queue) == 10


async def test_gate_lets_those_wait_whose_priority_rises_in_time() -> None:
    """What is ahead takes 65 seconds; but a level below, the turn comes after ten."""
    clock = [now()]
    gate = Gate(max_live=1, max_queued=20, max_wait_s=60.0, clock=lambda: clock[0])
    async with gate.permit(deadline_s=clock[0] + 500):
        clock[0] += 5.0
    log: list[int] = []
    async with gate.permit(deadline_s=clock[0] + 500):
        tasks = [asyncio.create_task(_enter(gate, clock[0] + 500, priority=1, log=log)) for _ in range(12)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"a place would take 65\.0 s, and nobody"):
            await _enter(gate, clock[0] + 500, priority=1 - 7)
        low = asyncio.create_task(_enter(gate, clock[0] + 500, priority=0, log=log))
        await asyncio.sleep(0)
        assert gate.queued == 13
        clock[0] += SECONDS_PER_PRIORITY_LEVEL + 1
    await asyncio.gather(*tasks, low)
    assert log.index(0) == 1  # the first of the others has waited as long


# --- how long an answer will take -----------------------------------------------------------------


async def test_gate_refuses_whose_own_service_would_take_too_long_beside_the_others() -> None:
    clock = [0.0]
    gate = Gate(max_live=9, max_queued=0, clock=lambda: clock[0])
    async with gate.permit(deadline_s=100, kind="long"):
        async with gate.permit(deadline_s=100, kind="long"):
            clock[0] = 10.0  # ten seconds, as one of two
        with pytest.raises(Overloaded, match=r"takes 12\.5 s, and 11\.0 s are left") as caught:
            await _enter(gate, 21.0, kind="long")
        assert caught.value.retry_after_s == 1.5
        await _enter(gate, 23.0, kind="long")  # there is time
        await _enter(gate, 10.5, kind="short")  # of which nothing is known
    await _enter(gate, 10.5, kind="long")  # nothing else is in progress: nobody is refused for being slow
    assert (gate.live, gate.queued) == (0, 0)


async def test_gate_judges_again_when_the_turn_comes() -> None:
    clock = [now()]
    gate = Gate(max_live=2, max_queued=9, clock=lambda: clock[0])
    started_s = clock[0]
    async with gate.permit(deadline_s=started_s + 100, kind="a"):
        async with gate.permit(deadline_s=started_s + 100, kind="a"):
            waiting = asyncio.create_task(_enter(gate, started_s + 15, kind="a"))  # nothing has been learned yet
            await asyncio.sleep(0)
            assert gate.queued == 1
            clock[0] += 10.0
        with pytest.raises(Overloaded, match=r"12\.5 s, and 5\.0 s are left"):
            await waiting
    assert (gate.live, gate.queued) == (0, 0)


async def test_gate_judges_by_those_in_progress_until_one_was_served() -> None:
    clock = [now()]
    gate = Gate(max_live=4, max_queued=9, first_live=lambda: 2, clock=lambda: clock[0])
    started_s = clock[0]

    def waits(seconds: float, kind: str = "a") -> asyncio.Task[None]:
        return asyncio.create_task(_enter(gate, started_s + seconds, kind=kind))

    async with gate.permit(deadline_s=started_s + 100, kind="a"):
        async with gate.permit(deadline_s=started_s + 100, kind="a"):
            hopeless, in_time, other = waits(17), waits(100), waits(17, kind="b")
            await asyncio.sleep(0)
            assert (gate.live, gate.queued) == (2, 3)  # fewer than later
            clock[0] += 10.0
            with pytest.raises(Overloaded, match=r"takes 32\.5 s, and 12\.0 s are left"):
                await waits(22)  # behind three others; the two in progress have taken ten seconds each
            assert gate.queued == 3
        with pytest.raises(Overloaded, match=r" 7\.0 s are left"):
            await hopeless  # which its turn, or its deadline, would have told later
        await asyncio.gather(in_time, other)
    assert (gate.live, gate.queued, gate.max_live) == (0, 0, 4)


async def test_gate_lets_in_those_that_wait_when_its_limit_grows() -> None:
    limit = 1
    gate = Gate(max_live=lambda: limit, max_queued=9)
    async with gate.permit(deadline_s=now() + 5):
        waiting = asyncio.create_task(_enter(gate, now() + 5))
        await asyncio.sleep(0)
        assert gate.queued == 1
        limit = 2
        gate.admit_waiting()
        await waiting


async def test_errors_teach_the_gate_nothing_but_deadlines_do() -> None:
    clock = [0.0]
    gate = Gate(max_live=9, max_queued=0, clock=lambda: clock[0])
    for seconds, deadline_s in ((1.0, 100.0), (20.0, 21.0)):
        with contextlib.suppress(RuntimeError):
            async with gate.permit(deadline_s=deadline_s):
                clock[0] += seconds
                raise RuntimeError
        assert gate.expected_wait_s(ahead=8) == (40.0 if seconds == 20.0 else 0.0)


def expected(times: ServiceTimes, *counts: float) -> list[float]:
    return [times.expected_s("a", concurrency=count) for count in counts]


def test_service_times_are_a_curve_over_what_was_learned() -> None:
    times = ServiceTimes()
    assert (times.mean_s, expected(times, 5)) == (0.0, [0.0])
    times.learn("a", 8.0, concurrency=4)
    assert expected(times, 1, 2, 4, 400) == [2.0, 4.0, 8.0, 8.0]
    times.learn("a", 20.0, concurrency=16)
    assert expected(times, 4, 10, 16, 400) == [8.0, 14.0, 20.0, 20.0]
    assert times.expected_s("b", concurrency=4) == 0.0
    assert times.mean_s == pytest.approx(8.0 + 0.2 * 12)


def test_service_times_of_a_bad_moment_are_forgotten() -> None:
    times = ServiceTimes()
    times.learn("a", 60.0, concurrency=32)
    times.learn("a", 60.0, concurrency=4)
    for _ in range(50):
        times.learn("a", 1.0, concurrency=4)
    # 32 at once have not been seen since; they take no more than eight times as long.
    assert expected(times, 4, 32) == pytest.approx([1.0, 8.0], rel=0.01)


class SharedMachine:
    """Serves everybody at once, each the more slowly the more there are."""

    TICK_S = 0.01

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s
        self._live = 0

    async def serve(self) -> None:
        self._live += 1
        left_s, before_s = self._cost_s, now()
        try:
            while left_s > 0:
                await asyncio.sleep(self.TICK_S)
                left_s -= (now() - before_s) / self._live
                before_s = now()
        finally:
            self._live -= 1


async def test_a_load_test_that_asks_too_much_dies_at_no_deadline_once_something_was_learned() -> None:
    """200 calls, 50 at a time, each with half of the time that serving 50 at once takes."""
    gate, machine = Gate(max_live=128, max_queued=256), SharedMachine(cost_s=0.04)
    outcomes: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # of the first calls, of the later ones

    async def call() -> str:
        deadline_s = now() + 1.0
        try:
            async with asyncio.timeout_at(deadline_s), gate.permit(deadline_s=deadline_s, kind="hello"):
                await machine.serve()
        except Overloaded as refusal:
            await asyncio.sleep(min(refusal.retry_after_s, 0.1))
            return "refused"
        except TimeoutError:
            return "deadline"
        return "ok"

    async def client() -> None:
        for number in range(4):
            outcomes[number == 0][await call()] += 1

    await asyncio.gather(*(client() for _ in range(50)))
    assert outcomes[True] == {"deadline": 50}  # nothing was known yet
    later = outcomes[False]
    assert set(later) == {"ok", "refused"}
    assert later["ok"] >= 10
    assert gate.live == 0
