"""Quotas of callers: what is counted, when it comes back, and what a client is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from router.quotas import Quotas
from served_router import details, failing, serving
from twinstage.errors import ConfigError, QuotaExceeded
from twinstage.rpc.access import Access
from twinstage.rpc.callers import Caller, Quota, read_callers
from twinstage.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, generation_pb2, generation_pb2_grpc

TOKEN, OTHER_TOKEN = "search-token-0123456789", "others-token-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_in_progress_are_limited() -> None:
    quotas = Quotas({"a": Quota(requests=1), "b": Quota()}, Clock())
    with quotas.admitted("a"):
        with pytest.raises(QuotaExceeded, match="1 requests in progress"), quotas.admitted("a"):
            pass
        with quotas.admitted("b"), quotas.admitted("b"), quotas.admitted("somebody else"):
            pass
    with quotas.admitted("a"):
        pass


def test_requests_per_minute_come_back_steadily() -> None:
    clock = Clock()
    quotas = Quotas({"a": Quota(requests_per_minute=6)}, clock)
    for _ in range(6):
        with quotas.admitted("a"):
            pass
    with pytest.raises(QuotaExceeded, match="6 requests a minute") as caught, quotas.admitted("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now_s += caught.value.retry_after_s
    with quotas.admitted("a"):
        pass
    with pytest.raises(QuotaExceeded), quotas.admitted("a"):
        pass


def test_tokens_are_taken_as_they_are_known_and_may_be_owed() -> None:
    clock = Clock()
    quotas = Quotas({"a": Quota(tokens_per_minute=60)}, clock)
    with quotas.admitted("a") as account:
        assert account is not None
        account.use_tokens(90)  # 30 more than there are
    with pytest.raises(QuotaExceeded, match="60 tokens a minute") as caught, quotas.admitted("a"):
        pass
    assert caught.value.retry_after_s == pytest.approx(31)
    clock.now_s += 31
    with quotas.admitted("a"):
        pass
    clock.now_s += 3600  # no more than a minute's worth is kept
    with quotas.admitted("a") as account:
        assert account is not None
        account.use_tokens(60)
    with pytest.raises(QuotaExceeded), quotas.admitted("a"):
        pass


def test_a_changed_quota_counts_from_what_was_used() -> None:
    quotas = Quotas({"a": Quota(requests=1, requests_per_minute=2), "b": Quota(requests=1)}, Clock())
    with quotas.admitted("a"):
        callers = (("a", Quota(requests=2, requests_per_minute=2)), ("c", Quota(requests_per_minute=1)))
        quotas.set_callers([Caller(name=name, digest=b"", quota=quota) for name, quota in callers])
        refused = pytest.raises(QuotaExceeded, match="2 requests in progress")
        with quotas.admitted("a"), quotas.admitted("b"), quotas.admitted("b"), refused, quotas.admitted("a"):
            pass
    with pytest.raises(QuotaExceeded, match="2 requests a minute"), quotas.admitted("a"):
        pass
    with quotas.admitted("c"):
        pass
    with pytest.raises(QuotaExceeded, match="1 requests a minute"), quotas.admitted("c"):
        pass


@pytest.mark.parametrize(
    ("words", "quota"),
    [
        ("", Quota()),
        ("use,admin requests=3", Quota(requests=3)),
        ("requests-per-minute=60 tokens-per-minute=1000", Quota(requests_per_minute=60, tokens_per_minute=1000)),
    ],
)
def test_the_tokens_file_has_quotas(tmp_path: Path, words: str, quota: Quota) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"search {TOKEN} {words}\n")
    (caller,) = read_callers(path, flag="--tokens-file")
    assert caller.quota == quota


@pytest.mark.parametrize("words", ["requests=0", "requests=x", "requests=-1", "speed=3", "requests=1 requests=2", "=3"])
def test_wrong_quotas_are_refused(tmp_path: Path, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"search {TOKEN} {words}\n")
    with pytest.raises(ConfigError, match="line 1: quotas are requests="):
        read_callers(path, flag="--tokens-file")


async def test_who_has_used_up_the_quota_is_told_when_to_come_back(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"search {TOKEN} requests=1 tokens-per-minute=30\nothers {OTHER_TOKEN}\n")
    request = generation_pb2.GenerateRequest(prompt="Hello", stopping=common_pb2.StoppingOptions(max_tokens=30))
    async with serving("--tokens-file", str(path)) as service:
        search, others = (
            generation_pb2_grpc.GenerationServiceStub(Access(token=token).authorized(service.channel))
            for token in (TOKEN, OTHER_TOKEN)
        )
        going_on = service.generators.prefill[0].script.stall("first_token")
        first = asyncio.ensure_future(search.Generate(request, timeout=10))
        await service.generators.prefill[0].script.reached("first_token").wait()
        error = await failing(search.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["ErrorInfo"].reason == "QUOTA_EXCEEDED"
        assert "RetryInfo" in details(error)
        assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
        # Nothing is done for such a request: its grammar, which is none, is not even looked at.
        no_grammar = common_pb2.StructuredOutput(regex="a{2,1}")
        error = await failing(
            search.Generate(generation_pb2.GenerateRequest(prompt="Hello", structured_output=no_grammar), timeout=10)
        )
        assert details(error)["ErrorInfo"].reason == "QUOTA_EXCEEDED"
        going_on.set()
        await first
        # 5 tokens of the prompt and 30 of the answer are more than there were.
        error = await failing(search.Generate(request, timeout=10))
        assert "30 tokens a minute" in (error.details() or "")
        embed = embedding_pb2_grpc.EmbeddingServiceStub(Access(token=TOKEN).authorized(service.channel)).Embed
        error = await failing(embed(embedding_pb2.EmbedRequest(texts=["a"]), timeout=10))
        assert details(error)["ErrorInfo"].reason == "QUOTA_EXCEEDED"
        await others.Generate(request, timeout=10)
