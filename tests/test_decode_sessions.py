"""The sessions of routers on a decode worker: what is said on them, and what becomes of those that are not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from decode_bench import NUM_BLOCKS, Bench, make_spec, open_bench
from decode_worker.service import DecodeServicer
from decode_worker.sessions import MAX_UNREAD_CHUNKS, MAX_UNREAD_MESSAGES, Session, SessionStep
from decode_worker.worker import DecodeWorker
from twinstage.errors import DeadlineExceeded, KvExhausted, Overloaded, WorkerLost
from twinstage.rpc.convert_worker import sequence_spec_to_proto
from twinstage.rpc.worker_service import Loading
from twinstage.types import ProducedToken, RequestId, SequenceSpec, TokenChunk
from twinstage.worker.v1 import worker_pb2


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
    async with open_bench() as bench:
        bench.worker.open_session("s")
        for name in ("a", "b"):
            await bench.worker.reserve("s", make_spec(request_id=name), timeout_s=60.0)
        with pytest.raises(KvExhausted, match="has 2 requests already"):
            await bench.worker.reserve("s", make_spec(request_id="c"), timeout_s=60.0)


async def test_a_router_that_does_not_read_loses_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.sessions.MAX_UNREAD_MESSAGES", 5)
    async with open_bench() as bench:
        bench.worker.open_session("s")
        spec = make_spec(max_tokens=100)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await bench.commit(grant, spec)
        await bench.all_blocks_free()
        with pytest.raises(WorkerLost):
            await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert (await anext(bench.worker.loads.watch(1.0))).finished == 0


async def test_aborting_all_ends_every_request_of_a_router_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.sessions.MAX_UNREAD_MESSAGES", 1)
    async with open_bench() as bench:
        bench.worker.open_session("s")
        for name in ("a", "b", "c", "d"):
            await bench.worker.reserve("s", make_spec(request_id=name), timeout_s=60.0)
        bench.worker.abort_all()  # the second failure overflows the session, which ends the third and fourth
        await bench.all_blocks_free()


async def test_a_session_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.service.OPEN_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[worker_pb2.SessionRequest]:
        await asyncio.Event().wait()
        yield worker_pb2.SessionRequest()

    async with open_bench() as bench:
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
    async with open_bench() as bench, _spoken_session(bench) as (says, heard):
        for message in (
            _reserve_message(make_spec()),
            _abort_message(make_spec()),
            _reserve_message(make_spec(request_id="next")),
        ):
            says.put_nowait(message)
        granted = (await anext(heard)).grant
        if granted.request_id == "r":  # it crossed the abort
            granted = (await anext(heard)).grant
        assert (granted.request_id, len(granted.grant.block_ids)) == ("next", 3)
        assert await bench.free_blocks() == NUM_BLOCKS - 3
        says.put_nowait(_abort_message(make_spec(request_id="next")))
        await bench.all_blocks_free()


async def test_a_reservation_that_waits_ends_with_its_session() -> None:
    async with open_bench(num_blocks=4) as bench:
        async with _spoken_session(bench) as (says, heard):
            says.put_nowait(_reserve_message(make_spec(12)))
            assert (await anext(heard)).HasField("grant")
            says.put_nowait(_reserve_message(make_spec(12, request_id="waits")))
            async with aclosing(bench.worker.loads.watch(30.0)) as loads:
                while (await anext(loads)).waiting != 1:
                    pass
        await bench.all_blocks_free()


async def test_a_reservation_that_is_refused_fails_alone() -> None:
    async with open_bench(num_blocks=4) as bench, _spoken_session(bench) as (says, heard):
        says.put_nowait(_reserve_message(make_spec(100, request_id="large")))
        says.put_nowait(_reserve_message(make_spec()))
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
