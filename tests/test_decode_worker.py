"""The decode worker's own parts: reservations, sessions, intake, and every way in which a request ends.

The engine is the real one over a stand-in model; the KV receiver is a stand-in that reports when the test says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

import decode_worker.arrivals
from decode_bench import NUM_BLOCKS, collect, collect_from, failure_of, make_spec, open_bench
from decode_worker.sessions import SessionStep
from twinstage.errors import (
    ComputeFailed,
    DeadlineExceeded,
    Draining,
    IntegrityError,
    StaleHandle,
    TransferError,
    WorkerLost,
)
from twinstage.hosting.books import keep_checking
from twinstage.lifecycle import DecodePhase, Lifecycle
from twinstage.types import FinishReason, RequestId, SequenceSpec
from worker_parts import continuation, next_token

# --- the prefix cache -----------------------------------------------------------------------------


async def test_a_grant_names_only_the_blocks_that_the_worker_lacks() -> None:
    async with open_bench(caches=True) as bench:
        session = bench.worker.open_session("s")

        async def one(spec: SequenceSpec, *, cached: int, granted: int) -> None:
            grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
            assert (grant.num_cached_blocks, len(grant.block_ids)) == (cached, granted)
            known = (*spec.prompt_token_ids, *spec.resumed_token_ids)
            await bench.commit(grant, spec)
            assert (await collect(session))[0] == continuation(known, 8)[1:]
            await bench.all_blocks_free()

        await one(make_spec(10), cached=0, granted=3)
        await one(make_spec(10), cached=2, granted=1)
        await one(make_spec(8), cached=2, granted=0)
        # 10 tokens and the 8 that followed, of which the last was not computed: 4 blocks are known.
        answer = continuation(make_spec(10).prompt_token_ids, 8)
        follow_up = replace(make_spec(10), prompt_token_ids=(*make_spec(10).prompt_token_ids, *answer, 1, 2, 3))
        await one(follow_up, cached=4, granted=2)
        await one(replace(make_spec(10), cache_salt="another"), cached=0, granted=3)
        assert bench.worker.reset_prefix_cache() > 0
        await one(make_spec(10), cached=0, granted=3)


async def test_blocks_of_a_transfer_that_failed_are_never_known() -> None:
    async with open_bench(caches=True) as bench:
        bench.worker.open_session("s")
        for outcome in ("failed", "aborted"):
            grant, _ = await bench.worker.reserve("s", make_spec(), timeout_s=60.0)
            assert grant.num_cached_blocks == 0
            await bench.open(grant)
            error = TransferError(f"the transfer {outcome}")
            await asyncio.to_thread(bench.receiver.delegate.failed, grant.transfer_id, error)
            await bench.all_blocks_free()


async def test_reserved_blocks_that_are_shared_cannot_be_evicted() -> None:
    async with open_bench(num_blocks=6, caches=True) as bench:
        session = bench.worker.open_session("s")
        spec = make_spec(10, max_tokens=3)
        first, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(first, spec)
        await collect(session)
        await bench.all_blocks_free()
        again, _ = await bench.worker.reserve("s", replace(spec, request_id=RequestId("again")), timeout_s=60.0)
        assert (again.num_cached_blocks, len(again.block_ids)) == (2, 1)
        assert await bench.free_blocks() == 3
        other = make_spec(12, request_id="other")
        other = replace(other, prompt_token_ids=tuple(range(40, 52)), max_tokens=2)
        grant, _ = await bench.worker.reserve("s", other, timeout_s=60.0)
        assert len(grant.block_ids) == 3
        assert set(grant.block_ids).isdisjoint(again.block_ids)
        assert await bench.free_blocks() == 0
        bench.worker.abort(session, RequestId("other"))
        await bench.commit(again, replace(spec, request_id=RequestId("again")))
        tokens, _ = await collect(session, "again")
        assert tokens == continuation(spec.prompt_token_ids, 3)[1:]


# --- one request ----------------------------------------------------------------------------------


async def test_a_grant_covers_the_prompt_and_the_tokens_go_to_the_session() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec(10, max_tokens=8)
        grant, queue_s = await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert len(grant.block_ids) == 3
        assert (grant.worker_id, grant.epoch) == ("stand-in", 1)
        assert len(grant.token) >= 16
        assert grant.endpoints == bench.receiver.endpoints
        assert 0 < grant.lease_s <= 60.0
        assert queue_s < 5
        first = await bench.commit(grant, spec)
        token_ids, last = await collect(session)
        assert [first, *token_ids] == continuation(spec.prompt_token_ids, 8)
        (totals,) = last.totals
        assert (totals.request_id, totals.kv_bytes_received, totals.computed_prompt_tokens) == ("r", 1000, 0)
        assert last.chunks[0].finish is not None
        assert last.chunks[0].finish.reason is FinishReason.LENGTH
        await bench.all_blocks_free()
        assert (await anext(bench.worker.loads.watch(1.0))).finished == 1


async def test_resumed_tokens_are_part_of_what_is_handed_over() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        whole = continuation(make_spec().prompt_token_ids, 8)
        spec = make_spec(10, max_tokens=8, resumed=tuple(whole[:4]))
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert len(grant.block_ids) == 4, "14 tokens"
        first = await bench.commit(grant, spec)
        token_ids, _ = await collect(session)
        assert [first, *token_ids] == whole[4:]


async def test_one_step_carries_the_tokens_of_all_requests_of_a_session() -> None:
    async with open_bench() as bench:
        sessions = [bench.worker.open_session(name) for name in ("s", "t")]
        specs = {name: make_spec(8, request_id=name, max_tokens=5) for name in ("a", "b", "c")}
        grants = {
            name: (await bench.worker.reserve("t" if name == "c" else "s", spec, timeout_s=60.0))[0]
            for name, spec in specs.items()
        }
        bench.runner.close_gate()
        await bench.commit(grants["a"], specs["a"])
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        await bench.commit(grants["b"], specs["b"])
        await bench.commit(grants["c"], specs["c"])
        bench.runner.open_gate()
        joined = 0
        finished: set[str] = set()
        async with asyncio.timeout(10):
            async for message in sessions[0].messages():
                assert isinstance(message, SessionStep)
                names = [chunk.request_id for chunk in message.chunks]
                assert "c" not in names
                joined += len(names) == 2
                finished |= {totals.request_id for totals in message.totals}
                if finished == {"a", "b"}:
                    break
        assert joined >= 3
        await collect(sessions[1], "c")
        await bench.all_blocks_free()


async def test_a_request_goes_through_its_phases_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[DecodePhase] = []
    advance = Lifecycle.advance

    def note(self: Lifecycle[DecodePhase], phase: DecodePhase) -> None:
        advance(self, phase)
        entered.append(phase)

    monkeypatch.setattr(Lifecycle, "advance", note)
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", make_spec(), timeout_s=60.0)
        await bench.open(grant)
        assert entered == [DecodePhase.RECEIVING]
        await bench.commit(grant, make_spec())
        await collect(session)
    assert entered == [DecodePhase.RECEIVING, DecodePhase.QUEUED, DecodePhase.DECODING]


async def test_a_preempted_request_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[DecodePhase] = []
    advance = Lifecycle.advance

    def note(self: Lifecycle[DecodePhase], phase: DecodePhase) -> None:
        advance(self, phase)
        entered.append(phase)

    monkeypatch.setattr(Lifecycle, "advance", note)
    async with open_bench(num_blocks=6) as bench:
        session = bench.worker.open_session("s")
        specs = {name: make_spec(8, request_id=name, max_tokens=12) for name in ("a", "b")}
        grants = {name: (await bench.worker.reserve("s", spec, timeout_s=60.0))[0] for name, spec in specs.items()}
        bench.runner.close_gate()
        for name, spec in specs.items():
            await bench.commit(grants[name], spec)
        bench.runner.open_gate()
        finished: set[str] = set()
        async with asyncio.timeout(10):
            async for message in session.messages():
                assert isinstance(message, SessionStep)
                finished |= {totals.request_id for totals in message.totals}
                if finished == {"a", "b"}:
                    break
    assert entered.count(DecodePhase.QUEUED) == entered.count(DecodePhase.DECODING) > 2


# --- hand-overs that go wrong ---------------------------------------------------------------------


async def test_a_commit_is_refused_after_an_abort() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker.abort(session, spec.request_id)
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)
        await bench.all_blocks_free()


async def test_blocks_stay_out_of_use_until_late_writes_are_impossible() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        bench.receiver.holds_fences = True
        await bench.worker.reserve("s", make_spec(), timeout_s=60.0)
        bench.worker.abort(session, RequestId("r"))
        assert await bench.free_blocks() == NUM_BLOCKS - 3
        await asyncio.to_thread(bench.receiver.fence_all)
        await bench.all_blocks_free()


@pytest.mark.parametrize("wrong", ["9 tokens", "request other"])
async def test_a_commit_about_something_else_is_refused_and_fails_the_request(wrong: str) -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        said, num_tokens = (spec, 9) if wrong == "9 tokens" else (make_spec(request_id="other"), 10)
        with pytest.raises(TransferError, match=wrong):
            await bench.commit(grant, said, num_tokens=num_tokens)
        assert wrong in str(await failure_of(session)), "at once: nobody can commit it any more"
        await bench.all_blocks_free()
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)


async def test_a_second_commit_is_refused() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await collect(session)
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)


async def test_a_failed_transfer_is_reported_and_its_blocks_return() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", make_spec(), timeout_s=60.0)
        await asyncio.to_thread(
            bench.receiver.delegate.failed, grant.transfer_id, TransferError("the sender went away")
        )
        error = await failure_of(session)
        assert isinstance(error, TransferError)
        assert error.retryable
        await bench.all_blocks_free()


async def test_a_grant_that_nobody_uses_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker.arrivals, "MAX_LEASE_S", 0.05)
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", make_spec(), timeout_s=30.0)
        error = await failure_of(session)
        assert isinstance(error, TransferError)
        assert "lease" in str(error)
        await bench.all_blocks_free()


@pytest.mark.parametrize("how", ["lease", "sender"])
async def test_a_client_s_own_deadline_is_no_fault_of_the_transfer(how: str) -> None:
    """Neither when nobody filled the blocks in time, nor when the sender gave up because of it."""
    with capture_logs() as logs:
        await _reach_the_deadline(how)
    (ended,) = [log for log in logs if log["event"] == "decode failed"]
    assert (ended["log_level"], ended["reason"]) == ("info", DeadlineExceeded.reason)


async def _reach_the_deadline(how: str) -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", make_spec(), timeout_s=0.05 if how == "lease" else 0.09)
        if how == "sender":
            await asyncio.to_thread(
                bench.receiver.delegate.failed, grant.transfer_id, TransferError("the sender went away")
            )
        assert isinstance(await failure_of(session), DeadlineExceeded)
        await bench.all_blocks_free()


async def test_a_committed_request_outlives_its_lease() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=0.3)
        bench.runner.close_gate()
        await bench.commit(grant, spec)
        await asyncio.sleep(grant.lease_s + 0.05)
        bench.runner.open_gate()
        token_ids, _ = await collect(session)
        assert len(token_ids) == 7


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["abort", "session"])
@pytest.mark.parametrize("phase", ["reserved", "receiving", "queued", "decoding"])
async def test_everything_is_freed_in_every_phase(phase: str, ending: str) -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec(max_tokens=100)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        if phase == "queued":
            bench.runner.close_gate()
        if phase == "receiving":
            await bench.open(grant)
        elif phase != "reserved":
            await bench.commit(grant, spec)
        if phase == "decoding":
            assert isinstance(await anext(session.messages()), SessionStep)
        if ending == "abort":
            bench.worker.abort(session, spec.request_id)
            bench.worker.abort(session, spec.request_id)
        else:
            bench.worker.end_session(session)
            bench.worker.end_session(session)
        bench.runner.open_gate()
        await bench.all_blocks_free()


async def test_a_lost_session_refuses_its_reservations_and_leaves_others_alone() -> None:
    async with open_bench(num_blocks=4) as bench:
        first, second = bench.worker.open_session("s"), bench.worker.open_session("t")
        await bench.worker.reserve("s", make_spec(8, request_id="a"), timeout_s=60.0)
        mine = asyncio.ensure_future(bench.worker.reserve("s", make_spec(12, request_id="b"), timeout_s=60.0))
        other = asyncio.ensure_future(bench.worker.reserve("t", make_spec(12, request_id="c"), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.end_session(first)
        with pytest.raises(WorkerLost):
            await mine
        grant, _ = await other
        assert len(grant.block_ids) == 3
        with pytest.raises(WorkerLost):
            await bench.worker.reserve("s", make_spec(), timeout_s=60.0)
        bench.worker.abort(second, RequestId("c"))
        await bench.all_blocks_free()


async def test_a_failed_forward_pass_fails_its_requests_and_the_worker_lives() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.runner.fail_next()
        await bench.commit(grant, spec)
        error = await failure_of(session)
        assert isinstance(error, ComputeFailed)
        assert error.retryable
        await bench.all_blocks_free()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await collect(session)


async def test_a_draining_worker_finishes_what_has_blocks_and_takes_nothing_new() -> None:
    async with open_bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        spec = make_spec(8, max_tokens=4)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", make_spec(12), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.begin_drain()
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker.end_session(bench.worker.open_session("a router that has just started"))
        load = await bench.load()
        assert (load.draining, load.unfinished, load.running) == (True, 1, 0)
        await bench.commit(grant, spec)
        await bench.all_blocks_free()
        bench.worker.begin_drain(for_good=True)
        with pytest.raises(Draining):
            bench.worker.open_session("t")
        with pytest.raises(Draining, match="shutting down"):
            bench.worker.end_drain()
        loads = bench.worker.loads.watch(0.05)
        await anext(loads)
        bench.worker.end_streams()
        messages = session.messages()
        token_ids, _ = await collect_from(messages)
        assert len(token_ids) == 3
        with pytest.raises(Draining):
            await anext(messages)
        await anext(loads)  # a router reads nothing of a session whose worker reports no load any more
        bench.worker.end_session(session)
        with pytest.raises(StopAsyncIteration):
            await anext(loads)


async def test_a_worker_that_does_not_drain_any_more_takes_requests() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        bench.worker.begin_drain()
        bench.worker.end_drain()
        spec = make_spec(8, max_tokens=4)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        assert len((await collect(session))[0]) == 3


@pytest.mark.parametrize("phase", ["nobody", "reserved", "quarantined", "running"])
async def test_blocks_that_nobody_answers_for_are_counted_whatever_else_is_held(phase: str) -> None:
    async with open_bench() as bench:
        bench.worker.open_session("s")
        spec = make_spec(8, max_tokens=4)
        if phase != "nobody":
            grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        if phase == "quarantined":
            await bench.open(grant)
            bench.worker.abort(bench.worker._sessions.get("s"), spec.request_id)
        elif phase == "running":
            bench.runner.close_gate()
            await bench.commit(grant, spec)
        assert (await bench.load()).leaked_kv_blocks == 0
        with bench.pool.allocate(2, owner="nobody#1"), capture_logs() as logs:
            assert (await bench.load()).leaked_kv_blocks == 2
            await bench.load()
            assert [(entry["log_level"], entry["owners"]) for entry in logs] == [("error", {"nobody#1": 2})]
        assert (await bench.load()).leaked_kv_blocks == 0


async def test_books_that_do_not_balance_are_found_when_the_worker_is_idle_and_it_takes_nothing_new() -> None:
    async with open_bench() as bench:
        bench.worker.open_session("s")
        checking = asyncio.create_task(keep_checking(bench.worker, interval_s=0.01))
        spec = make_spec(8, max_tokens=4)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.pool._holders[grant.block_ids[0]] += 1  # a bug would do that
        await asyncio.sleep(0.1)
        assert not checking.done(), "it is checked when the worker is idle"
        assert not (await bench.load()).draining
        bench.worker.abort(bench.worker._sessions.get("s"), spec.request_id)
        async with asyncio.timeout(5):
            await checking
        with pytest.raises(Draining, match="until it is restarted: its books of KV blocks do not balance"):
            bench.worker.end_drain()
        assert (await bench.load()).draining
        bench.worker.end_session(bench.worker.open_session("who collects what it has left"))
        bench.pool._let_go(grant.block_ids[0])


async def test_a_check_that_fails_by_itself_is_not_the_last_one_and_drains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[Exception] = [IntegrityError("two owners"), KeyError("a bug in the check")]

    def check() -> None:
        assert not bench.worker._door.is_closed
        raise checks.pop()

    async with open_bench() as bench:
        monkeypatch.setattr(bench.worker, "check_books", check)
        async with asyncio.timeout(5):
            await keep_checking(bench.worker, interval_s=0.0)
        assert not checks
        assert (await bench.load()).draining


async def test_many_requests_through_a_small_pool_are_all_right() -> None:
    """Reservations, preemptions and aborts at once; every output is right and every block comes back."""
    async with open_bench(num_blocks=12, max_num_sequences=4) as bench:
        session = bench.worker.open_session("s")
        specs = {f"r{index}": make_spec(3 + index % 9, request_id=f"r{index}", max_tokens=20) for index in range(24)}
        expected = {name: continuation(spec.prompt_token_ids, 20) for name, spec in specs.items()}
        outputs: dict[str, list[int]] = {name: [] for name in specs}
        ended: dict[str, asyncio.Event] = {name: asyncio.Event() for name in specs}

        async def read() -> None:
            async for message in session.messages():
                assert isinstance(message, SessionStep), message
                for chunk in message.chunks:
                    outputs[chunk.request_id] += [token.token_id for token in chunk.tokens]
                    if chunk.finish is not None:
                        ended[chunk.request_id].set()

        async def one(index: int, spec: SequenceSpec) -> None:
            grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
            if index % 4 == 3:
                bench.worker.abort(session, spec.request_id)
                return
            outputs[spec.request_id].append(next_token(spec.prompt_token_ids))
            await bench.commit(grant, spec)
            await ended[spec.request_id].wait()

        reader = asyncio.ensure_future(read())
        async with asyncio.timeout(20):
            await asyncio.gather(*(one(index, spec) for index, spec in enumerate(specs.values())))
        await bench.all_blocks_free()
        for index, name in enumerate(specs):
            if index % 4 != 3:
                assert outputs[name] == expected[name]
        bench.worker.end_session(session)
        await reader


async def test_an_engine_that_refuses_a_sequence_fails_it_and_leaks_nothing() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = make_spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker._engine.stop()
        await bench.commit(grant, spec)
        assert isinstance(await failure_of(session), Draining)
        await bench.all_blocks_free()
