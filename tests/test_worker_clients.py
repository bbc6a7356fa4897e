"""The router's connections to workers: what ends with them, and that nothing goes on behind them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fake_workers import FakeCluster, FakeDecode, until
from twinstage.errors import TwinstageError, WorkerLost
from twinstage.rpc.clients import DecodeSession, WorkerConnection
from twinstage.types import RequestId
from twinstage.worker.v1 import worker_pb2

MINE = RequestId("mine")


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[FakeDecode, WorkerConnection]]:
    async with FakeCluster() as cluster:
        connection = WorkerConnection(cluster.decode[0].address)
        try:
            yield cluster.decode[0], connection
        finally:
            await connection.close()


async def test_what_is_subscribed_to_a_session_fails_with_it_and_so_does_what_comes_too_late() -> None:
    async with connected() as (_, connection):
        session = await connection.open_session(timeout_s=5)
        with session.subscribe(MINE) as early:
            session.close()
            with session.subscribe(RequestId("late")) as late, session.subscribe(RequestId("later")) as later:
                async with asyncio.timeout(5):
                    for waiting in (early.receive(), early.broken(), late.receive(), later.broken()):
                        with pytest.raises(WorkerLost):
                            await waiting
            heard: list[TwinstageError] = []
            with early.hearing_failure(heard.append):
                assert [type(error) for error in heard] == [WorkerLost]


async def test_a_worker_that_takes_nothing_any_more_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, and what is to be said of them may not pile up."""
    monkeypatch.setattr("twinstage.rpc.decode_session.MAX_UNSENT", 10)
    async with connected() as (_, connection):
        session = await connection.open_session(timeout_s=5)
        with session.subscribe(MINE) as mine:
            for number in range(10):
                session.abort(RequestId(str(number)))
            assert not mine.ended
            session.abort(RequestId("one more"))
            with pytest.raises(WorkerLost, match="has not read 10 messages"):
                await mine.receive()


def senders() -> list[asyncio.Task[Any]]:
    """The tasks that send the requests of sessions."""
    return [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task.get_coro())]


async def test_session_that_its_worker_ended_leaves_no_task_behind() -> None:
    async with connected() as (worker, connection):
        session = await connection.open_session(timeout_s=5)
        assert len(senders()) == 1
        run = asyncio.create_task(session.run())
        await worker.kill()
        with pytest.raises(WorkerLost):
            await run
        await until(lambda: not senders(), what="the sender has ended")


@pytest.mark.parametrize("cancelled", [True, False])
async def test_session_that_does_not_open_is_closed(monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    closed: list[DecodeSession] = []
    monkeypatch.setattr(DecodeSession, "close", lambda self: closed.append(self))

    async def open_session(self: DecodeSession) -> None:
        if not cancelled:
            raise WorkerLost("the worker did not open the session")
        await asyncio.Event().wait()

    monkeypatch.setattr(DecodeSession, "open", open_session)
    async with connected() as (_, connection):
        opening = asyncio.create_task(connection.open_session(timeout_s=5))
        await asyncio.sleep(0.05)
        opening.cancel()
        with pytest.raises((WorkerLost, asyncio.CancelledError)):
            await opening
        assert len(closed) == 1


async def test_bundle_that_nobody_waits_for_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is cancelled between sending the request and reading the answer."""
    calls: list[Any] = []
    async with connected() as (worker, connection):
        stub = connection._worker
        real = stub.GetTokenizerBundle

        def call_then_cancel(request: worker_pb2.GetTokenizerBundleRequest, timeout: float) -> Any:
            calls.append(real(request, timeout=timeout))
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return calls[-1]

        monkeypatch.setattr(stub, "GetTokenizerBundle", call_then_cancel)
        fingerprint = worker.description.model.tokenizer_fingerprint
        task = asyncio.create_task(connection.tokenizer_bundle(fingerprint, timeout_s=30))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls[0].done()
    gc.collect()
