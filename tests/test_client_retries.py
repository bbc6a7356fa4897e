"""The client makes calls again as the router's status says: when, how often, and what is never made again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fake_public_api import FakeApi, serving
from twinstage.client import AsyncTwinstageClient, Options, TwinstageClient
from twinstage.client.retry import Attempts
from twinstage.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    QuotaExceeded,
    StreamBroken,
    TwinstageError,
    Unavailable,
)

SOON = 0.05


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving(FakeApi()) as served:
        yield served


def _unary(client: TwinstageClient) -> str:
    return client.generate("Hi").text


def _stream(client: TwinstageClient) -> str:
    return "".join(delta.text for delta in client.chat_stream("Hi"))


@pytest.mark.parametrize("ask", [_unary, _stream])
def test_a_refused_call_is_made_again_when_the_status_says(api: FakeApi, ask: Callable[[TwinstageClient], str]) -> None:
    api.refusals = [QuotaExceeded("full", retry_after_s=SOON), NoWorker("nobody", retry_after_s=2 * SOON)]
    started_s = time.monotonic()
    with TwinstageClient(api.address) as client:
        assert ask(client) == "Paris"
    assert time.monotonic() - started_s >= 3 * SOON
    assert len(api.requests) == 3
    assert api.requests[0] == api.requests[2]


@pytest.mark.parametrize("ask", [_unary, _stream])
def test_the_last_refusal_is_told(api: FakeApi, ask: Callable[[TwinstageClient], str]) -> None:
    api.refusals = [Overloaded(f"full {number}", retry_after_s=0.0) for number in range(9)]
    with TwinstageClient(api.address, retries=3) as client, pytest.raises(Overloaded, match="full 3"):
        ask(client)
    assert len(api.requests) == 4


@pytest.mark.parametrize(
    "error",
    [InvalidRequest([FieldViolation("prompt", "is empty")]), InternalError("a bug"), StreamBroken("x", tokens_sent=1)],
)
def test_without_a_time_to_come_back_nothing_is_made_again(api: FakeApi, error: TwinstageError) -> None:
    api.refusals = [error]
    with TwinstageClient(api.address) as client, pytest.raises(type(error)):
        client.generate("Hi")
    assert len(api.requests) == 1


def test_a_stream_that_has_begun_is_not_made_again(api: FakeApi) -> None:
    api.error = Unavailable("lost", retry_after_s=0.0)
    with TwinstageClient(api.address) as client, client.chat_stream("Hi") as stream, pytest.raises(Unavailable):
        list(stream)
    assert len(api.requests) == 1


def test_waiting_ends_with_the_time_of_the_call(api: FakeApi) -> None:
    api.refusals = [Overloaded("full", retry_after_s=30.0)]
    started_s = time.monotonic()
    with TwinstageClient(api.address) as client, pytest.raises(Overloaded):
        client.generate("Hi", Options(timeout_s=5.0))
    assert time.monotonic() - started_s < 5
    api.refusals = [Overloaded("full", retry_after_s=0.3)]
    api.hangs = True
    with TwinstageClient(api.address) as client, pytest.raises(DeadlineExceeded):
        list(client.generate_stream("Hi", Options(timeout_s=0.6)))
    assert time.monotonic() - started_s < 5


def test_who_cancels_while_it_waits_is_not_served(api: FakeApi) -> None:
    api.refusals = [Overloaded("full", retry_after_s=0.0)]
    with TwinstageClient(api.address) as client:
        stream = client.chat_stream("Hi")
        stream.cancel()
        with pytest.raises((Cancelled, Overloaded)):
            list(stream)
    assert len(api.requests) <= 1


async def test_the_same_in_asyncio(api: FakeApi) -> None:
    api.refusals = [QuotaExceeded("full", retry_after_s=SOON)]
    async with AsyncTwinstageClient(api.address, retries=1) as client:
        assert (await client.generate("Hi")).text == "Paris"
        api.refusals = [Overloaded("full", retry_after_s=SOON)]
        async with client.chat_stream("Hi") as stream:
            assert "".join([delta.text async for delta in stream]) == "Paris"
        api.refusals = [Overloaded("full", retry_after_s=0.0)] * 2
        with pytest.raises(Overloaded):
            await client.generate("Hi")
    assert len(api.requests) == 6


class _Told(Exception):
    """A failed call with a pushback."""

    def __init__(self, pushback: str) -> None:
        self._pushback = pushback

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("grpc-retry-pushback-ms", self._pushback),)


@pytest.mark.parametrize(("pushback", "pause_s"), [("0", 0.0), ("1500", 1.5), ("-1", None), ("soon", None), ("", None)])
def test_a_pushback_that_is_no_time_means_do_not_come_back(pushback: str, pause_s: float | None) -> None:
    told: Any = _Told(pushback)
    assert Attempts(1, None).pause_s(told) == pause_s
