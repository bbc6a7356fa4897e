"""The decode worker's own parts: reservations, sessions, intake, and every way in which a request ends.

The engine is the real one over a stand-in model; the KV receiver is a stand-in that reports when the test says so.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

import decode_worker.arrivals
from decode_worker.grants import MAX_TOKENS_NAMED_AT_ONCE, block_names
from decode_worker.reservations import Reservations, Wish
from decode_worker.service import DecodeServicer
from decode_worker.sessions import (
    MAX_UNREAD_CHUNKS,
    MAX_UNREAD_MESSAGES,
    Session,
    SessionFailure,
    SessionMessage,
    SessionStep,
)
from decode_worker.worker import DecodeWorker
from twinstage.errors import (
    AlreadyExists,
    Cancelled,
    ComputeFailed,
    DeadlineExceeded,
    Draining,
    IntegrityError,
    InternalError,
    InvalidRequest,
    KvExhausted,
    Overloaded,
    StaleHandle,
    TransferError,
    TwinstageError,
    WorkerLost,
)
from twinstage.hosting.books import keep_checking
from twinstage.kv.block_pool import BlockPool, BlockTable
from twinstage.kv.prefix_index import BlockHash, HashChain, PrefixHasher, PrefixIndex
from twinstage.lifecycle import DecodePhase, Lifecycle
from twinstage.rpc.convert_worker import sequence_spec_to_proto
from twinstage.rpc.worker_service import Loading
from twinstage.transfer.receiver import TransferDelegate
from twinstage.transfer.values import HandoverCommit, ReceivedBlocks
from twinstage.types import (
    FinishReason,
    KvEndpoint,
    KvGrant,
    ProducedToken,
    RequestId,
    Role,
    SamplingParameters,
    SequenceSpec,
    TokenChunk,
    WorkerLoad,
)
from twinstage.worker.v1 import worker_pb2
from worker_parts import VOCABULARY_SIZE, StandInRunner, continuation, description, engine_parts, next_token

BLOCK_SIZE = 4
NUM_BLOCKS = 32


@dataclass(eq=False)
class StandInReceiver:
    """Knows what is expected; the test commits, fails and fences."""

    delegate: TransferDelegate
    expected: dict[int, KvGrant] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    revoked: dict[int, Callable[[], None]] = field(default_factory=dict)
    holds_fences: bool = False
    bytes_received: int = 0
    endpoints: tuple[KvEndpoint, ...] = (KvEndpoint(transport="tcp", address=":1", host_id="host"),)

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.fence_all()

    def expect(self, grant: KvGrant) -> None:
        self.expected[grant.transfer_id] = grant

    def revoke(self, transfer_id: int, on_fenced: Callable[[], None]) -> None:
        self.expected.pop(transfer_id, None)
        if self.holds_fences:
            self.revoked[transfer_id] = on_fenced
        else:
            on_fenced()

    def fence_all(self) -> None:
        self.holds_fences = False
        while self.revoked:
            self.revoked.popitem()[1]()


@dataclass(eq=False)
class Bench:
    """A decode worker over stand-ins."""

    worker: DecodeWorker
    receiver: StandInReceiver
    runner: StandInRunner

    async def commit(self, grant: KvGrant, spec: SequenceSpec, *, num_tokens: int | None = None) -> int:
        """Hand `spec` over from another thread, as the channel does. Returns the first token."""
        known = (*spec.prompt_token_ids, *spec.resumed_token_ids)
        token = next_token(known)
        commit = HandoverCommit(
            request_id=spec.request_id,
            num_tokens=len(known) if num_tokens is None else num_tokens,
            first_tokens=((0, token),),
        )
        received = ReceivedBlocks(kv_bytes=1000, num_blocks=len(grant.block_ids), transport="tcp")
        if grant.transfer_id not in self.receiver.opened:
            await self.open(grant)
        await asyncio.to_thread(self.receiver.delegate.committed, grant.transfer_id, commit, received)
        return token

    async def open(self, grant: KvGrant) -> None:
        """A prefill worker comes to fill the grant."""
        self.receiver.opened.add(grant.transfer_id)
        await asyncio.to_thread(self.receiver.delegate.opened, grant.transfer_id)

    @property
    def pool(self) -> BlockPool:
        return self.worker._parts.pool

    async def load(self) -> WorkerLoad:
        return await anext(self.worker.loads.watch(1.0))

    async def free_blocks(self) -> int:
        return (await self.load()).free_kv_blocks

    async def all_blocks_free(self) -> None:
        async with asyncio.timeout(10):
            await self.worker.wait_idle()
        assert await self.free_blocks() == self.worker.description.total_kv_blocks


@asynccontextmanager
async def _bench(
    *, num_blocks: int = NUM_BLOCKS, max_num_sequences: int = 16, caches: bool = False
) -> AsyncIterator[Bench]:
    runner = StandInRunner()
    parts = engine_parts(
        runner, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_sequences=max_num_sequences, caches=caches
    )
    receivers: list[StandInReceiver] = []

    def open_receiver(delegate: TransferDelegate) -> StandInReceiver:
        receivers.append(StandInReceiver(delegate))
        return receivers[0]

    worker = DecodeWorker(
        parts,
        open_receiver=open_receiver,  # type: ignore[arg-type]
        description=description(num_blocks=num_blocks, block_size=BLOCK_SIZE, role=Role.DECODE),
        tokenizer_bundle=b"bundle",
        loop=asyncio.get_running_loop(),
    )
    try:
        yield Bench(worker=worker, receiver=receivers[0], runner=runner)
    finally:
        runner.open_gate()
        worker.begin_drain()
        worker.abort_all()
        receivers[0].fence_all()
        async with asyncio.timeout(10):
            await worker.wait_idle()
        assert await asyncio.to_thread(worker.close) == 0


def _spec(
    length: int = 10, *, request_id: str = "r", max_tokens: int = 8, resumed: tuple[int, ...] = ()
) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(index % VOCABULARY_SIZE for index in range(5, 5 + length)),
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=max_tokens,
        resumed_token_ids=resumed,
    )


async def _collect(session: Session, request_id: str = "r") -> tuple[list[int], SessionStep]:
    """The tokens of one request until it finishes, and the step in which it did."""
    return await _collect_from(session.messages(), request_id)


async def _collect_from(
    messages: AsyncIterator[SessionMessage], request_id: str = "r"
) -> tuple[list[int], SessionStep]:
    token_ids: list[int] = []
    async with asyncio.timeout(10):
        async for message in messages:
            assert isinstance(message, SessionStep), message
            for chunk in message.chunks:
                if chunk.request_id == request_id:
                    token_ids += [token.token_id for token in chunk.tokens]
                    if chunk.finish is not None:
                        return token_ids, message
    raise AssertionError("the session ended before the request")


async def _failure(session: Session) -> TwinstageError:
    async with asyncio.timeout(10):
        async for message in session.messages():
            if isinstance(message, SessionFailure):
                return message.error
    raise AssertionError("the session ended without a failure")


# --- the prefix cache -----------------------------------------------------------------------------


async def test_a_grant_names_only_the_blocks_that_the_worker_lacks() -> None:
    async with _bench(caches=True) as bench:
        session = bench.worker.open_session("s")

        async def one(spec: SequenceSpec, *, cached: int, granted: int) -> None:
            grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
            assert (grant.num_cached_blocks, len(grant.block_ids)) == (cached, granted)
            known = (*spec.prompt_token_ids, *spec.resumed_token_ids)
            await bench.commit(grant, spec)
            assert (await _collect(session))[0] == continuation(known, 8)[1:]
            await bench.all_blocks_free()

        await one(_spec(10), cached=0, granted=3)
        await one(_spec(10), cached=2, granted=1)
        await one(_spec(8), cached=2, granted=0)
        # 10 tokens and the 8 that followed, of which the last was not computed: 4 blocks are known.
        answer = continuation(_spec(10).prompt_token_ids, 8)
        follow_up = replace(_spec(10), prompt_token_ids=(*_spec(10).prompt_token_ids, *answer, 1, 2, 3))
        await one(follow_up, cached=4, granted=2)
        await one(replace(_spec(10), cache_salt="another"), cached=0, granted=3)
        assert bench.worker.reset_prefix_cache() > 0
        await one(_spec(10), cached=0, granted=3)


async def test_blocks_of_a_transfer_that_failed_are_never_known() -> None:
    async with _bench(caches=True) as bench:
        bench.worker.open_session("s")
        for outcome in ("failed", "aborted"):
            grant, _ = await bench.worker.reserve("s", _spec(), timeout_s=60.0)
            assert grant.num_cached_blocks == 0
            await bench.open(grant)
            error = TransferError(f"the transfer {outcome}")
            await asyncio.to_thread(bench.receiver.delegate.failed, grant.transfer_id, error)
            await bench.all_blocks_free()


async def test_reserved_blocks_that_are_shared_cannot_be_evicted() -> None:
    async with _bench(num_blocks=6, caches=True) as bench:
        session = bench.worker.open_session("s")
        spec = _spec(10, max_tokens=3)
        first, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(first, spec)
        await _collect(session)
        await bench.all_blocks_free()
        again, _ = await bench.worker.reserve("s", replace(spec, request_id=RequestId("again")), timeout_s=60.0)
        assert (again.num_cached_blocks, len(again.block_ids)) == (2, 1)
        assert await bench.free_blocks() == 3
        other = _spec(12, request_id="other")
        other = replace(other, prompt_token_ids=tuple(range(40, 52)), max_tokens=2)
        grant, _ = await bench.worker.reserve("s", other, timeout_s=60.0)
        assert len(grant.block_ids) == 3
        assert set(grant.block_ids).isdisjoint(again.block_ids)
        assert await bench.free_blocks() == 0
        bench.worker.abort(session, RequestId("other"))
        await bench.commit(again, replace(spec, request_id=RequestId("again")))
        tokens, _ = await _collect(session, "again")
        assert tokens == continuation(spec.prompt_token_ids, 3)[1:]


# --- one request ----------------------------------------------------------------------------------


async def test_a_grant_covers_the_prompt_and_the_tokens_go_to_the_session() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec(10, max_tokens=8)
        grant, queue_s = await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert len(grant.block_ids) == 3
        assert (grant.worker_id, grant.epoch) == ("stand-in", 1)
        assert len(grant.token) >= 16
        assert grant.endpoints == bench.receiver.endpoints
        assert 0 < grant.lease_s <= 60.0
        assert queue_s < 5
        first = await bench.commit(grant, spec)
        token_ids, last = await _collect(session)
        assert [first, *token_ids] == continuation(spec.prompt_token_ids, 8)
        (totals,) = last.totals
        assert (totals.request_id, totals.kv_bytes_received, totals.computed_prompt_tokens) == ("r", 1000, 0)
        assert last.chunks[0].finish is not None
        assert last.chunks[0].finish.reason is FinishReason.LENGTH
        await bench.all_blocks_free()
        assert (await anext(bench.worker.loads.watch(1.0))).finished == 1


async def test_resumed_tokens_are_part_of_what_is_handed_over() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        whole = continuation(_spec().prompt_token_ids, 8)
        spec = _spec(10, max_tokens=8, resumed=tuple(whole[:4]))
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert len(grant.block_ids) == 4, "14 tokens"
        first = await bench.commit(grant, spec)
        token_ids, _ = await _collect(session)
        assert [first, *token_ids] == whole[4:]


async def test_one_step_carries_the_tokens_of_all_requests_of_a_session() -> None:
    async with _bench() as bench:
        sessions = [bench.worker.open_session(name) for name in ("s", "t")]
        specs = {name: _spec(8, request_id=name, max_tokens=5) for name in ("a", "b", "c")}
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
        await _collect(sessions[1], "c")
        await bench.all_blocks_free()


async def test_a_request_goes_through_its_phases_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[DecodePhase] = []
    advance = Lifecycle.advance

    def note(self: Lifecycle[DecodePhase], phase: DecodePhase) -> None:
        advance(self, phase)
        entered.append(phase)

    monkeypatch.setattr(Lifecycle, "advance", note)
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", _spec(), timeout_s=60.0)
        await bench.open(grant)
        assert entered == [DecodePhase.RECEIVING]
        await bench.commit(grant, _spec())
        await _collect(session)
    assert entered == [DecodePhase.RECEIVING, DecodePhase.QUEUED, DecodePhase.DECODING]


async def test_a_preempted_request_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[DecodePhase] = []
    advance = Lifecycle.advance

    def note(self: Lifecycle[DecodePhase], phase: DecodePhase) -> None:
        advance(self, phase)
        entered.append(phase)

    monkeypatch.setattr(Lifecycle, "advance", note)
    async with _bench(num_blocks=6) as bench:
        session = bench.worker.open_session("s")
        specs = {name: _spec(8, request_id=name, max_tokens=12) for name in ("a", "b")}
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
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker.abort(session, spec.request_id)
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)
        await bench.all_blocks_free()


async def test_blocks_stay_out_of_use_until_late_writes_are_impossible() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        bench.receiver.holds_fences = True
        await bench.worker.reserve("s", _spec(), timeout_s=60.0)
        bench.worker.abort(session, RequestId("r"))
        assert await bench.free_blocks() == NUM_BLOCKS - 3
        await asyncio.to_thread(bench.receiver.fence_all)
        await bench.all_blocks_free()


@pytest.mark.parametrize("wrong", ["9 tokens", "request other"])
async def test_a_commit_about_something_else_is_refused_and_fails_the_request(wrong: str) -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        said, num_tokens = (spec, 9) if wrong == "9 tokens" else (_spec(request_id="other"), 10)
        with pytest.raises(TransferError, match=wrong):
            await bench.commit(grant, said, num_tokens=num_tokens)
        assert wrong in str(await _failure(session)), "at once: nobody can commit it any more"
        await bench.all_blocks_free()
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)


async def test_a_second_commit_is_refused() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await _collect(session)
        with pytest.raises(StaleHandle):
            await bench.commit(grant, spec)


async def test_a_failed_transfer_is_reported_and_its_blocks_return() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", _spec(), timeout_s=60.0)
        await asyncio.to_thread(
            bench.receiver.delegate.failed, grant.transfer_id, TransferError("the sender went away")
        )
        error = await _failure(session)
        assert isinstance(error, TransferError)
        assert error.retryable
        await bench.all_blocks_free()


async def test_a_grant_that_nobody_uses_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_worker.arrivals, "MAX_LEASE_S", 0.05)
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(), timeout_s=30.0)
        error = await _failure(session)
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
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        grant, _ = await bench.worker.reserve("s", _spec(), timeout_s=0.05 if how == "lease" else 0.09)
        if how == "sender":
            await asyncio.to_thread(
                bench.receiver.delegate.failed, grant.transfer_id, TransferError("the sender went away")
            )
        assert isinstance(await _failure(session), DeadlineExceeded)
        await bench.all_blocks_free()


async def test_a_committed_request_outlives_its_lease() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=0.3)
        bench.runner.close_gate()
        await bench.commit(grant, spec)
        await asyncio.sleep(grant.lease_s + 0.05)
        bench.runner.open_gate()
        token_ids, _ = await _collect(session)
        assert len(token_ids) == 7


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["abort", "session"])
@pytest.mark.parametrize("phase", ["reserved", "receiving", "queued", "decoding"])
async def test_everything_is_freed_in_every_phase(phase: str, ending: str) -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec(max_tokens=100)
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
    async with _bench(num_blocks=4) as bench:
        first, second = bench.worker.open_session("s"), bench.worker.open_session("t")
        await bench.worker.reserve("s", _spec(8, request_id="a"), timeout_s=60.0)
        mine = asyncio.ensure_future(bench.worker.reserve("s", _spec(12, request_id="b"), timeout_s=60.0))
        other = asyncio.ensure_future(bench.worker.reserve("t", _spec(12, request_id="c"), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.end_session(first)
        with pytest.raises(WorkerLost):
            await mine
        grant, _ = await other
        assert len(grant.block_ids) == 3
        with pytest.raises(WorkerLost):
            await bench.worker.reserve("s", _spec(), timeout_s=60.0)
        bench.worker.abort(second, RequestId("c"))
        await bench.all_blocks_free()


async def test_a_failed_forward_pass_fails_its_requests_and_the_worker_lives() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.runner.fail_next()
        await bench.commit(grant, spec)
        error = await _failure(session)
        assert isinstance(error, ComputeFailed)
        assert error.retryable
        await bench.all_blocks_free()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await _collect(session)


async def test_a_draining_worker_finishes_what_has_blocks_and_takes_nothing_new() -> None:
    async with _bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        spec = _spec(8, max_tokens=4)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", _spec(12), timeout_s=60.0))
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
        token_ids, _ = await _collect_from(messages)
        assert len(token_ids) == 3
        with pytest.raises(Draining):
            await anext(messages)
        await anext(loads)  # a router reads nothing of a session whose worker reports no load any more
        bench.worker.end_session(session)
        with pytest.raises(StopAsyncIteration):
            await anext(loads)


async def test_a_worker_that_does_not_drain_any_more_takes_requests() -> None:
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        bench.worker.begin_drain()
        bench.worker.end_drain()
        spec = _spec(8, max_tokens=4)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        assert len((await _collect(session))[0]) == 3


@pytest.mark.parametrize("phase", ["nobody", "reserved", "quarantined", "running"])
async def test_blocks_that_nobody_answers_for_are_counted_whatever_else_is_held(phase: str) -> None:
    async with _bench() as bench:
        bench.worker.open_session("s")
        spec = _spec(8, max_tokens=4)
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
    async with _bench() as bench:
        bench.worker.open_session("s")
        checking = asyncio.create_task(keep_checking(bench.worker, interval_s=0.01))
        spec = _spec(8, max_tokens=4)
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


# --- the door -------------------------------------------------------------------------------------


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with _bench(num_blocks=4) as bench:
        bench.worker.open_session("s")
        cases: list[tuple[SequenceSpec, type[TwinstageError]]] = [
            (_spec(0), InvalidRequest),
            (_spec(256), InvalidRequest),
            (_spec(16), KvExhausted),  # fills the pool; the next token has no place
            (_spec(4, max_tokens=2, resumed=(1, 2)), InvalidRequest),
        ]
        for spec, error in cases:
            with pytest.raises(error):
                await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.all_blocks_free()
        with pytest.raises(AlreadyExists):
            bench.worker.open_session("s")


async def test_a_full_pool_serves_reservations_in_order_as_blocks_return() -> None:
    async with _bench(num_blocks=8) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(32 - BLOCK_SIZE, request_id="holder"), timeout_s=60.0)
        await bench.worker.reserve("s", _spec(BLOCK_SIZE, request_id="other"), timeout_s=60.0)
        order: list[str] = []

        async def reserve(name: str, length: int) -> None:
            await bench.worker.reserve("s", _spec(length, request_id=name), timeout_s=60.0)
            order.append(name)

        large = asyncio.ensure_future(reserve("large", 24))
        small = asyncio.ensure_future(reserve("small", 4))
        await asyncio.sleep(0.05)
        assert order == []
        assert (await anext(bench.worker.loads.watch(1.0))).waiting == 2
        bench.worker.abort(session, RequestId("holder"))
        await asyncio.gather(large, small)
        assert order == ["large", "small"]


async def test_a_reservation_waits_until_its_deadline() -> None:
    async with _bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(8, request_id="holder"), timeout_s=60.0)
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await bench.worker.reserve("s", _spec(12), timeout_s=0.1)
        assert 0.09 < asyncio.get_running_loop().time() - started_s < 5
        bench.worker.abort(session, RequestId("holder"))
        await bench.all_blocks_free()


async def test_a_cancelled_reservation_lets_the_next_one_through() -> None:
    async with _bench(num_blocks=4) as bench:
        bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(8, request_id="holder"), timeout_s=60.0)
        large = asyncio.ensure_future(bench.worker.reserve("s", _spec(12), timeout_s=60.0))
        small = asyncio.ensure_future(bench.worker.reserve("s", _spec(8), timeout_s=60.0))
        await asyncio.sleep(0)
        large.cancel()
        async with asyncio.timeout(5):
            grant, _ = await small
        assert len(grant.block_ids) == 2


def _reservations(pool: BlockPool, *, headroom: Callable[[], int] = lambda: 0) -> Reservations[BlockTable]:
    return Reservations(
        pool,
        may_take=lambda: True,
        headroom=headroom,
        give_up=lambda table: table.release(),
        on_change=lambda: None,
    )


def _wish(num_blocks: int, name: str = "r") -> Wish:
    return Wish(request_id=RequestId(name), session_id="s", owner=RequestId(name), num_blocks=num_blocks)


def _wait_in_line(
    reservations: Reservations[BlockTable], wishes: dict[str, int], order: list[str], **options: int
) -> list[asyncio.Task[None]]:
    """Tasks that wait for blocks, keep them, and enter their names into `order`."""

    async def take(name: str, num_blocks: int) -> None:
        wish = replace(_wish(num_blocks, name), **options)  # type: ignore[arg-type]
        tables.append(await reservations.take(wish, lambda table: table, timeout_s=60.0))
        order.append(name)

    tables: list[BlockTable] = []
    return [asyncio.create_task(take(name, num_blocks)) for name, num_blocks in wishes.items()]


async def test_a_failure_of_any_kind_frees_the_blocks_and_fails_that_reservation_alone() -> None:
    pool = BlockPool(16)
    holder = pool.allocate(16, owner="holder")
    reservations = _reservations(pool)

    def fail(_table: BlockTable) -> NoReturn:
        raise KeyError("a bug")

    failing = asyncio.ensure_future(reservations.take(_wish(10, "failing"), fail, timeout_s=60.0))
    after_it = asyncio.ensure_future(reservations.take(_wish(16, "after it"), lambda table: table, timeout_s=5.0))
    await asyncio.sleep(0)
    holder.release()
    reservations.serve()
    with pytest.raises(InternalError):
        await failing
    (await after_it).release()
    assert len(reservations) == 0
    assert pool.num_free == 16


async def test_a_large_reservation_neither_holds_up_small_ones_nor_is_starved_by_them() -> None:
    """A pool of 16 with 10 blocks held. 12 are wanted first; small ones pass until they have had as many."""
    pool = BlockPool(16)
    holder = pool.allocate(10, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    tasks = _wait_in_line(reservations, {"large": 12}, order)
    await asyncio.sleep(0)
    small = 0

    async def take_and_return() -> None:
        nonlocal small
        table = await reservations.take(_wish(2, "small"), lambda table: table, timeout_s=60.0)
        small += 1
        order.append("small")
        await asyncio.sleep(0)
        table.release()
        reservations.serve()

    for _ in range(20):  # there is always another one
        tasks.append(asyncio.create_task(take_and_return()))
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert small == 6, "as many blocks as the large one wants, and no more"
    assert order == ["small"] * 6
    assert pool.num_free == 6
    holder.release()
    reservations.serve()
    await asyncio.gather(*tasks)
    assert order[6] == "large"
    assert len(reservations) == 0


async def test_reservations_of_higher_priority_come_first() -> None:
    pool = BlockPool(4)
    holder = pool.allocate(4, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    tasks = _wait_in_line(reservations, {"a": 1, "b": 1}, order)
    await asyncio.sleep(0)
    tasks += _wait_in_line(reservations, {"urgent": 1}, order, priority=1)
    tasks += _wait_in_line(reservations, {"background": 1}, order, priority=-1)
    await asyncio.sleep(0)
    holder.release()
    reservations.serve()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "a", "b", "background"]


async def test_cancelled_reservations_leave_the_queue_at_once() -> None:
    """A thousand that were given up are not looked at any more when blocks come back."""
    pool = BlockPool(2)
    holder = pool.allocate(2, owner="holder")
    reservations, order = _reservations(pool), list[str]()
    given_up = _wait_in_line(reservations, {f"r{number}": 2 for number in range(1000)}, order)
    await asyncio.sleep(0)
    patient = _wait_in_line(reservations, {"patient": 2}, order)
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    await asyncio.gather(*given_up, return_exceptions=True)
    assert len(reservations) == 1
    holder.release()
    reservations.serve()
    await asyncio.gather(*patient)
    assert order == ["patient"]


@pytest.mark.parametrize("ending", ["cancel", "deadline"])
async def test_blocks_that_came_in_the_moment_of_the_end_go_back(ending: str) -> None:
    pool = BlockPool(4)
    reservations = _reservations(pool)
    holder = pool.allocate(4, owner="holder")
    timeout_s = 0.05 if ending == "deadline" else 60.0
    waiting = asyncio.ensure_future(reservations.take(_wish(2), lambda table: table, timeout_s=timeout_s))
    await asyncio.sleep(0)
    if ending == "deadline":
        time.sleep(0.06)  # noqa: ASYNC251 - the event loop must find both at once: the blocks and the end
    holder.release()
    reservations.serve()  # the blocks are given,
    assert pool.num_free == 2
    if ending == "cancel":
        waiting.cancel()  # and nobody is there any more to take them
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        result = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(result, BlockTable):
            result.release()
        else:
            assert isinstance(result, DeadlineExceeded)
    assert pool.num_free == 4
    assert len(reservations) == 0
    pool.check_integrity()


async def test_blocks_that_cannot_be_used_go_back_and_the_next_one_is_served() -> None:
    pool = BlockPool(4)
    reservations: Reservations[int] = Reservations(
        pool,
        may_take=lambda: True,
        headroom=lambda: 0,
        give_up=lambda reserved: None,
        on_change=lambda: None,
    )
    wish = Wish(request_id=RequestId("r"), session_id="s", owner=RequestId("r#1"), num_blocks=4)

    def use(table: BlockTable) -> int:
        raise IntegrityError("the grant was refused")

    with pytest.raises(IntegrityError, match="refused"):
        await reservations.take(wish, use, timeout_s=5.0)
    assert pool.num_free == 4
    assert await reservations.take(wish, len, timeout_s=5.0) == 4


async def test_the_queue_of_reservations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.reservations.MAX_WAITING", 2)
    pool = BlockPool(1)
    holder = pool.allocate(1, owner="holder")
    reservations = _reservations(pool)
    waiting = [
        asyncio.ensure_future(reservations.take(_wish(1, name), lambda table: table, timeout_s=60.0)) for name in "ab"
    ]
    await asyncio.sleep(0)
    with pytest.raises(KvExhausted):
        await reservations.take(_wish(1, "c"), lambda table: table, timeout_s=60.0)
    reservations.refuse(Draining("over"))
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, Draining)
    holder.release()
    assert len(reservations) == 0


async def test_a_long_prompt_that_waits_is_looked_up_only_when_the_pool_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookups: list[int] = []
    match = PrefixIndex.match

    def counting(index: PrefixIndex, hashes: Sequence[BlockHash], *, multiple: int = 1) -> list[int]:
        lookups.append(len(hashes))
        return match(index, hashes, multiple=multiple)

    pool = BlockPool(600)
    hasher = PrefixHasher("layout", block_size=BLOCK_SIZE)
    holders = [pool.allocate(count, owner="holder") for count in (500, 50, 50)]
    running = 2
    reservations = _reservations(pool, headroom=lambda: running)
    monkeypatch.setattr(PrefixIndex, "match", counting)
    wish = replace(_wish(500), hashes=hasher.chain(range(2000)))
    waiting = asyncio.ensure_future(reservations.take(wish, lambda table: table, timeout_s=60.0))
    await asyncio.sleep(0)
    for _ in range(100):  # each step of the engine asks
        reservations.serve()
    assert lookups == [500]
    holders[1].release()
    for _ in range(100):
        reservations.serve()
    holders[0].publish(0, hasher.chain(range(2000)).hashes[:449])
    for _ in range(100):
        reservations.serve()
    assert lookups == [500] * 3
    running = 1  # 51 blocks and one to stay free are too many still
    reservations.serve()
    holders[2].release()
    reservations.serve()
    assert lookups == [500] * 5
    assert (await waiting).num_shared == 449


async def test_a_long_prompt_is_named_beside_the_event_loop_and_a_short_one_at_once() -> None:
    threads: list[str] = []

    class Noting(PrefixHasher):
        def chain(self, token_ids: Sequence[int] = (), *, salt: str = "") -> HashChain:
            threads.append(threading.current_thread().name)
            return super().chain(token_ids, salt=salt)

    hasher = Noting("layout", block_size=BLOCK_SIZE)
    for extra in (0, 1):
        spec = replace(_spec(), prompt_token_ids=tuple(range(MAX_TOKENS_NAMED_AT_ONCE - 1)), resumed_token_ids=(1,))
        spec = replace(spec, resumed_token_ids=(1,) * (1 + extra), cache_salt="salt")
        names = await block_names(spec, hasher)
        known = [*spec.prompt_token_ids, *spec.resumed_token_ids]
        assert names is not None
        assert names.hashes == PrefixHasher("layout", block_size=BLOCK_SIZE).chain(known, salt="salt").hashes
    assert [name == threading.current_thread().name for name in threads] == [True, False]


async def test_a_worker_that_begins_to_drain_while_a_prompt_is_named_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_worker.grants.MAX_TOKENS_NAMED_AT_ONCE", 0)
    async with _bench(caches=True) as bench:
        bench.worker.open_session("s")
        reserving = asyncio.ensure_future(bench.worker.reserve("s", _spec(), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.begin_drain()
        with pytest.raises(Draining):
            await reserving
        await bench.all_blocks_free()


async def test_running_sequences_keep_room_to_grow() -> None:
    pool = BlockPool(4)
    running = 2
    reservations = _reservations(pool, headroom=lambda: running)
    waiting = asyncio.ensure_future(reservations.take(_wish(3), lambda table: table, timeout_s=60.0))
    await asyncio.sleep(0)
    assert pool.num_free == 4
    running = 1
    reservations.serve()
    (await waiting).release()


async def test_an_abort_ends_a_reservation_that_waits() -> None:
    async with _bench(num_blocks=4) as bench:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(8, request_id="holder"), timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", _spec(12), timeout_s=60.0))
        await asyncio.sleep(0)
        bench.worker.abort(session, RequestId("r"))
        with pytest.raises(Cancelled):
            await waiting
        bench.worker.abort(session, RequestId("holder"))
        await bench.all_blocks_free()


async def test_load_watchers_see_reservations_wait() -> None:
    async with _bench(num_blocks=4) as bench, aclosing(bench.worker.loads.watch(30.0)) as loads:
        session = bench.worker.open_session("s")
        await bench.worker.reserve("s", _spec(8, request_id="holder"), timeout_s=60.0)
        waiting = asyncio.ensure_future(bench.worker.reserve("s", _spec(12), timeout_s=60.0))
        async with asyncio.timeout(5):
            while (await anext(loads)).waiting != 1:
                pass
        bench.worker.abort(session, RequestId("holder"))
        async with asyncio.timeout(5):
            while (await anext(loads)).waiting != 0:
                pass
        await waiting


# --- sessions -------------------------------------------------------------------------------------


def _step() -> SessionStep:
    return SessionStep(chunks=(), totals=())


async def test_a_session_that_is_not_read_is_given_up() -> None:
    session = Session("s")
    for _ in range(MAX_UNREAD_MESSAGES):
        session.put(_step())
    assert not session.closed
    session.put(_step())
    assert session.closed
    with pytest.raises(Overloaded):
        await anext(session.messages())


async def test_a_session_is_given_up_by_its_tokens_too() -> None:
    """A step carries a token of every sequence, so the number of messages says little."""
    session = Session("s")
    chunk = TokenChunk(request_id=RequestId("r"), tokens=(ProducedToken(token_id=1),))
    step = SessionStep(chunks=(chunk,) * 512, totals=())
    messages = session.messages()
    for _ in range(3 * MAX_UNREAD_CHUNKS // 512):  # what is read does not count
        session.put(step)
        await anext(messages)
    for _ in range(MAX_UNREAD_CHUNKS // 512):
        session.put(step)
    assert not session.closed
    session.put(step)
    assert session.closed
    with pytest.raises(Overloaded):
        await anext(messages)


async def test_requests_with_blocks_are_bounded_although_they_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.arrivals.MAX_REQUESTS", 2)
    async with _bench() as bench:
        bench.worker.open_session("s")
        for name in ("a", "b"):
            await bench.worker.reserve("s", _spec(request_id=name), timeout_s=60.0)
        with pytest.raises(KvExhausted, match="has 2 requests already"):
            await bench.worker.reserve("s", _spec(request_id="c"), timeout_s=60.0)


async def test_a_router_that_does_not_read_loses_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.sessions.MAX_UNREAD_MESSAGES", 5)
    async with _bench() as bench:
        bench.worker.open_session("s")
        spec = _spec(max_tokens=100)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await bench.all_blocks_free()
        with pytest.raises(WorkerLost):
            await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert (await anext(bench.worker.loads.watch(1.0))).finished == 0


async def test_aborting_all_ends_every_request_of_a_router_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.sessions.MAX_UNREAD_MESSAGES", 1)
    async with _bench() as bench:
        bench.worker.open_session("s")
        for name in ("a", "b", "c", "d"):
            await bench.worker.reserve("s", _spec(request_id=name), timeout_s=60.0)
        bench.worker.abort_all()  # the second failure overflows the session, which ends the third and fourth
        await bench.all_blocks_free()


async def test_a_session_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.service.OPEN_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[worker_pb2.SessionRequest]:
        await asyncio.Event().wait()
        yield worker_pb2.SessionRequest()

    async with _bench() as bench:
        loading: Loading[DecodeWorker] = Loading()
        loading.set(bench.worker)
        async with asyncio.timeout(5):
            with pytest.raises(DeadlineExceeded, match="not opened"):
                await anext(DecodeServicer(loading, lease_s=10.0).Session(silent(), None))


def _reserve_message(spec: SequenceSpec) -> worker_pb2.SessionRequest:
    reserve = worker_pb2.SessionReserve(sequence=sequence_spec_to_proto(spec), deadline_ms=60_000)
    return worker_pb2.SessionRequest(reserve=reserve)


def _abort_message(spec: SequenceSpec) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(abort=worker_pb2.SessionAbort(request_id=spec.request_id))


@asynccontextmanager
async def _spoken_session(
    bench: Bench,
) -> AsyncIterator[tuple[asyncio.Queue[worker_pb2.SessionRequest], AsyncIterator[worker_pb2.SessionResponse]]]:
    """An open session: what the router says, and what it hears."""
    says: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
    says.put_nowait(worker_pb2.SessionRequest(open=worker_pb2.SessionOpen(session_id="s")))

    async def requests() -> AsyncIterator[worker_pb2.SessionRequest]:
        while True:
            yield await says.get()

    loading: Loading[DecodeWorker] = Loading()
    loading.set(bench.worker)
    async with aclosing(DecodeServicer(loading, lease_s=10.0).Session(requests(), None)) as heard, asyncio.timeout(10):  # type: ignore[type-var]
        assert (await anext(heard)).HasField("opened")
        yield says, heard


async def test_an_abort_right_behind_a_reservation_leaves_nothing_and_the_next_one_is_granted() -> None:
    async with _bench() as bench, _spoken_session(bench) as (says, heard):
        for message in (_reserve_message(_spec()), _abort_message(_spec()), _reserve_message(_spec(request_id="next"))):
            says.put_nowait(message)
        granted = (await anext(heard)).grant
        if granted.request_id == "r":  # it crossed the abort
            granted = (await anext(heard)).grant
        assert (granted.request_id, len(granted.grant.block_ids)) == ("next", 3)
        assert await bench.free_blocks() == NUM_BLOCKS - 3
        says.put_nowait(_abort_message(_spec(request_id="next")))
        await bench.all_blocks_free()


async def test_a_reservation_that_waits_ends_with_its_session() -> None:
    async with _bench(num_blocks=4) as bench:
        async with _spoken_session(bench) as (says, heard):
            says.put_nowait(_reserve_message(_spec(12)))
            assert (await anext(heard)).HasField("grant")
            says.put_nowait(_reserve_message(_spec(12, request_id="waits")))
            async with aclosing(bench.worker.loads.watch(30.0)) as loads:
                while (await anext(loads)).waiting != 1:
                    pass
        await bench.all_blocks_free()


async def test_a_reservation_that_is_refused_fails_alone() -> None:
    async with _bench(num_blocks=4) as bench, _spoken_session(bench) as (says, heard):
        says.put_nowait(_reserve_message(_spec(100, request_id="large")))
        says.put_nowait(_reserve_message(_spec()))
        failure, grant = (await anext(heard)).failure, (await anext(heard)).grant
        assert (failure.request_id, failure.reason) == ("large", KvExhausted.reason)
        assert grant.request_id == "r"


async def test_what_was_said_before_the_end_is_delivered() -> None:
    session = Session("s")
    session.put(_step())
    session.close(WorkerLost("over"))
    session.put(_step())
    messages = session.messages()
    assert await anext(messages) == _step()
    with pytest.raises(WorkerLost):
        await anext(messages)


async def test_many_requests_through_a_small_pool_are_all_right() -> None:
    """Reservations, preemptions and aborts at once; every output is right and every block comes back."""
    async with _bench(num_blocks=12, max_num_sequences=4) as bench:
        session = bench.worker.open_session("s")
        specs = {f"r{index}": _spec(3 + index % 9, request_id=f"r{index}", max_tokens=20) for index in range(24)}
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
    async with _bench() as bench:
        session = bench.worker.open_session("s")
        spec = _spec()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker._engine.stop()
        await bench.commit(grant, spec)
        assert isinstance(await _failure(session), Draining)
        await bench.all_blocks_free()
