"""Load runs against a real router on workers without a model, and against OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fake_openai import FakeOpenAi
from fake_workers import MAX_MODEL_LEN, FakeCluster, until
from router.__main__ import Router
from router.config import RouterSettings
from test_load_plan import entry, write_trace
from twinstage.bench import (
    Arrivals,
    LoadOptions,
    LoadResult,
    PromptForm,
    Protocol,
    RequestRecord,
    Slo,
    TokenRange,
    TraceOptions,
    run_load,
    run_sweep,
)
from twinstage.bench.http_stream import Endpoint
from twinstage.bench.results import Outcome
from twinstage.bench.summary import Snapshot
from twinstage.errors import ConfigError, InternalError, Unavailable
from twinstage.settings import read_settings


@dataclass
class Served:
    cluster: FakeCluster
    address: str

    def options(self, **values: Any) -> LoadOptions:
        small = {"prompt_tokens": TokenRange(5, 9), "output_tokens": TokenRange(6, 6)}
        usual = {"prompt_seed": 1, "warmup_requests": 0}
        return LoadOptions(**{"addresses": (self.address,), **small, **usual, **values})


@contextlib.asynccontextmanager
async def routed() -> AsyncIterator[Served]:
    async with FakeCluster() as cluster:
        workers = [argument for address in cluster.addresses for argument in ("--workers", address)]
        router = Router(read_settings(RouterSettings, ["--listen", "127.0.0.1:0", *workers]))
        await router.start()
        try:
            await until(lambda: all(one.life and one.life.load for one in router.workers.entries), what="workers known")
            yield Served(cluster, f"127.0.0.1:{router.port}")
            await cluster.assert_idle()
        finally:
            await router.stop()


def assert_balanced(result: LoadResult) -> None:
    """The parts of a result agree with one another."""
    counts = result.requests
    assert counts.sent == counts.succeeded + counts.failed + counts.cancelled
    assert sum(error.count for error in result.errors) == counts.failed
    assert sum(entry.finished for entry in result.timeline) == counts.succeeded
    assert sum(bar.count for bar in result.ttft_bars) == (result.ttft.count if result.ttft else 0)
    assert result.output_tokens_per_s == pytest.approx(result.tokens.output / result.duration_s)


# --- Twinstage ------------------------------------------------------------------------------------


async def test_a_closed_loop_keeps_its_concurrency_and_counts_every_token() -> None:
    async with routed() as served:
        options = served.options(concurrency=3, requests=12, warmup_requests=4, slo=Slo(ttft_s=30), seed=5)
        records: list[RequestRecord] = []
        result = await run_load(options, on_request=records.append)
        specs = served.cluster.prefill[0].specs
    assert_balanced(result)
    assert len(records) == 12  # the warm-up has none
    assert sum(record.prompt_tokens for record in records) == result.tokens.prompt
    assert all(record.outcome is Outcome.SUCCEEDED and record.output_tokens == 6 for record in records)
    assert all(0 <= record.sent_s <= (record.ttft_s or 0) <= record.e2e_s for record in records)
    assert (result.requests.succeeded, result.requests.wrong_length) == (12, 0)
    assert result.model == "fake"
    assert result.tokens.output == 12 * 6
    assert max(one.in_flight for one in result.timeline) == 3
    assert len(specs) == 16
    assert all(5 <= len(spec.prompt_token_ids) <= 9 and spec.max_tokens == 6 for spec in specs)
    assert not any(spec.stop_token_ids for spec in specs)  # the end-of-sequence token is ignored
    assert result.tokens.prompt == sum(len(spec.prompt_token_ids) for spec in specs[4:])
    assert len({spec.prompt_token_ids for spec in specs}) == 16
    assert result.ttft is not None
    assert result.tpot is not None
    assert result.e2e is not None
    assert result.ttft.count == result.e2e.count == 12
    assert result.ttft.max_s <= result.e2e.max_s
    assert result.server["prefill"].p50_s == pytest.approx(0.002)
    assert result.server["kv_transfer"].max_s == pytest.approx(0.003)
    assert result.kv_bytes > 0
    assert result.goodput is not None
    assert result.goodput.share == 1


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Every answer stalls until all requests have come, which a closed loop could never see happen."""
    async with routed() as served:
        prefill = served.cluster.prefill[0]
        stalls = [prefill.script.stall("first_token") for _ in range(5)]
        options = served.options(rate_per_s=50.0, arrivals=Arrivals.CONSTANT, requests=5)
        running = asyncio.create_task(run_load(options))
        await until(lambda: len(prefill.running) == 5, what="five requests at once")
        for stall in stalls:
            stall.set()
        result = await running
    assert_balanced(result)
    assert result.requests.succeeded == 5
    assert max(one.in_flight for one in result.timeline) == 5


async def test_waiting_for_a_place_is_part_of_the_latency() -> None:
    """With one place and a first answer that takes 0.4 s, the requests planned meanwhile are 0.4 s late, and say so."""
    async with routed() as served:
        stall = served.cluster.prefill[0].script.stall("first_token")
        options = served.options(rate_per_s=100.0, arrivals=Arrivals.CONSTANT, requests=3, max_in_flight=1)
        running = asyncio.create_task(run_load(options))
        await served.cluster.prefill[0].script.reached("first_token").wait()
        await asyncio.sleep(0.4)
        stall.set()
        result = await running
    assert max(one.in_flight for one in result.timeline) == 1
    assert result.ttft is not None
    assert result.ttft.min_s > 0.35
    assert result.generator.start_delay is not None
    assert result.generator.start_delay.max_s > 0.35


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace",
        entry(0, 1024, 256, [1, 2]),
        entry(8_000, 1500, 128, [1, 2, 3]),
        entry(12_000, 512 * 20, 64, list(range(10, 30))),
    )
    async with routed() as served:
        trace = TraceOptions(path=path, speed=40, scale=64)
        result = await run_load(served.options(trace=trace))
        first, second, third = (spec.prompt_token_ids for spec in served.cluster.prefill[0].specs)
    assert_balanced(result)
    assert result.label == "trace x40"
    assert [len(first), len(second), len(third)] == [16, 23, MAX_MODEL_LEN - 1]
    assert second[:16] == first
    assert result.requests.capped == 1
    assert any("cut to the model's context" in warning for warning in result.warnings)
    assert 0.3 <= result.duration_s < 5
    assert result.tokens.output == 4 + 2 + 1


async def test_texts_arrive_with_the_planned_number_of_tokens() -> None:
    async with routed() as served:
        result = await run_load(served.options(concurrency=2, requests=6, prompt_form=PromptForm.TEXT))
        lengths = [len(spec.prompt_token_ids) for spec in served.cluster.prefill[0].specs]
    assert result.requests.wrong_length == 0
    assert all(5 <= length <= 9 for length in lengths)


async def test_failures_are_counted_by_code_and_reason() -> None:
    async with routed() as served:
        served.cluster.decode[0].script.fail("reserve", InternalError("no room here"), times=2)
        records: list[RequestRecord] = []
        result = await run_load(served.options(concurrency=1, requests=3), on_request=records.append)
        assert_balanced(result)
        assert [record.outcome for record in records] == [Outcome.FAILED, Outcome.FAILED, Outcome.SUCCEEDED]
        assert [record.error for record in records] == ["INTERNAL INTERNAL", "INTERNAL INTERNAL", ""]
        assert (result.requests.succeeded, result.requests.failed) == (1, 2)
        (error,) = result.errors
        assert (error.code, error.reason, error.count) == ("INTERNAL", "INTERNAL", 2)
        assert "no room here" in error.example


async def test_a_deadline_is_an_error_of_the_request() -> None:
    async with routed() as served:
        served.cluster.prefill[0].script.stall("first_token")
        result = await run_load(served.options(concurrency=1, requests=2, timeout_s=1.5))
    assert [(error.code, error.count) for error in result.errors] == [("DEADLINE_EXCEEDED", 1)]
    assert result.requests.succeeded == 1


async def test_a_stopped_run_has_what_was_measured_so_far() -> None:
    async with routed() as served:
        stop = asyncio.Event()
        seen: list[Snapshot] = []
        served.cluster.decode[0].script.stall("decode 3")
        options = served.options(concurrency=1, requests=10)
        running = asyncio.create_task(run_load(options, stop=stop, on_progress=seen.append))
        await until(lambda: seen and seen[-1].output_tokens >= 3, what="tokens of a request that then stalls")
        stop.set()
        result = await asyncio.wait_for(running, 5)
    assert_balanced(result)
    assert result.interrupted
    assert (result.requests.sent, result.requests.cancelled, result.requests.failed) == (1, 1, 0)
    assert result.ttft is not None


async def test_a_duration_ends_the_sending() -> None:
    async with routed() as served:
        result = await run_load(served.options(concurrency=2, duration_s=0.6))
        assert_balanced(result)
        assert result.requests.succeeded > 2
        assert result.requests.cancelled == result.requests.failed == 0
        assert 0.5 < result.duration_s < 5
        opened = await run_load(served.options(rate_per_s=20.0, arrivals=Arrivals.CONSTANT, duration_s=0.49))
        assert opened.requests.succeeded == 10


async def test_a_sweep_measures_each_level_with_prompts_of_its_own() -> None:
    async with routed() as served:
        levels: list[tuple[str, int, int]] = []
        results = await run_sweep(
            served.options(requests=4, concurrency=1),
            concurrencies=(1, 2),
            rates=(40.0,),
            on_level=lambda options, number, total: levels.append((options.label, number, total)),
        )
        specs = served.cluster.prefill[0].specs
    assert [result.label for result in results] == ["concurrency 1", "concurrency 2", "rate 40/s"]
    assert levels == [("concurrency 1", 1, 3), ("concurrency 2", 2, 3), ("rate 40/s", 3, 3)]
    assert len({spec.prompt_token_ids for spec in specs}) == 12
    assert {result.prompt_seed for result in results} == {1}


async def test_several_addresses_take_turns() -> None:
    async with routed() as first, routed() as second:
        result = await run_load(first.options(addresses=(first.address, second.address), concurrency=1, requests=6))
        assert len(first.cluster.prefill[0].specs) == len(second.cluster.prefill[0].specs) == 3
    assert result.requests.succeeded == 6


async def test_what_cannot_work_is_said_before_anything_is_sent() -> None:
    async with routed() as served:
        with pytest.raises(ConfigError, match=r"no generation model 'other'.*served: fake"):
            await run_load(served.options(concurrency=1, model="other"))
        with pytest.raises(ConfigError, match="the model's context has 64"):
            await run_load(served.options(concurrency=1, prompt_tokens=TokenRange(60, 60)))
        assert not served.cluster.prefill[0].specs
    with pytest.raises(Unavailable, match=r"no router answers at 127\.0\.0\.1:1"):
        await run_load(served.options(addresses=("127.0.0.1:1",), concurrency=1))


# --- OpenAI ---------------------------------------------------------------------------------------


def openai_options(server: FakeOpenAi, **values: Any) -> LoadOptions:
    usual = {
        "protocol": Protocol.OPENAI,
        "concurrency": 2,
        "requests": 6,
        "prompt_tokens": TokenRange(20, 20),
        "output_tokens": TokenRange(8, 8),
        "vocabulary_size": 1000,
        "prompt_seed": 1,
        "warmup_requests": 0,
    }
    return LoadOptions(**{"addresses": (server.address,), **usual, **values})


@pytest.mark.parametrize(
    ("server", "is_chunked", "messages"),
    [
        (FakeOpenAi(), True, 8),
        (FakeOpenAi(), False, 8),
        (FakeOpenAi(tokens_per_event=3), True, 3),  # says nothing of how many tokens an event holds
        (FakeOpenAi(tokens_per_event=3, counts="ids"), True, 3),
        (FakeOpenAi(silent_every=2), True, 4),  # nor that one without text holds one
        (FakeOpenAi(silent_every=2, counts="ids"), True, 8),
        (FakeOpenAi(silent_every=2, counts="usage"), True, 8),
        (FakeOpenAi(silent_every=2, counts="timings"), True, 8),
    ],
)
async def test_openai_streams(server: FakeOpenAi, is_chunked: bool, messages: int) -> None:
    server.is_chunked = is_chunked
    async with server:
        result = await run_load(openai_options(server, warmup_requests=1))
    assert_balanced(result)
    assert (result.requests.succeeded, result.requests.wrong_length) == (6, 0)
    assert (result.tokens.prompt, result.tokens.output, result.tokens.messages) == (120, 48, 6 * messages)
    assert result.tokens.cached_prompt == 12
    assert result.itl is not None
    assert result.itl.count == 6 * (messages - 1)
    assert result.server["prefill"].p50_s == pytest.approx(0.0125)
    request = server.requests[-1]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 8, 0.0)
    assert request["ignore_eos"] is True
    assert request["stream_options"]["include_usage"] is True
    assert len(request["prompt"]) == 20


@pytest.mark.parametrize("counts", ["ids", "usage", "timings"])
async def test_openai_tokens_are_counted_as_they_come(counts: str) -> None:
    """Before the usage at the end tells the sum: what had come of an answer that broke off is right, too."""
    async with FakeOpenAi(tokens_per_event=2, silent_every=2, counts=counts) as server:
        server.breaks_off = True
        records: list[RequestRecord] = []
        await run_load(openai_options(server, requests=1), on_request=records.append)
    assert [record.output_tokens for record in records] == [8]


async def test_both_protocols_send_the_same_prompts() -> None:
    async with routed() as served, FakeOpenAi() as server:
        await run_load(served.options(concurrency=1, requests=4, vocabulary_size=200, seed=3))
        lengths = {"prompt_tokens": TokenRange(5, 9), "output_tokens": TokenRange(6, 6), "vocabulary_size": 200}
        await run_load(openai_options(server, concurrency=1, requests=4, seed=3, **lengths))
        sent = [list(spec.prompt_token_ids) for spec in served.cluster.prefill[0].specs]
    assert [request["prompt"] for request in server.requests] == sent


@pytest.mark.parametrize("path", ["/tokenize", "/extras/tokenize"])
async def test_openai_texts(path: str) -> None:
    async with FakeOpenAi() as server:
        server.tokenize_path = path
        result = await run_load(openai_options(server, prompt_form=PromptForm.TEXT, vocabulary_size=None))
        assert all(len(request["prompt"].split()) == 19 for request in server.requests)
    assert (result.requests.succeeded, result.requests.wrong_length) == (6, 0)


async def test_openai_failures() -> None:
    async with FakeOpenAi() as server:
        server.status = 503
        refused = await run_load(openai_options(server))
        server.status, server.breaks_off = 200, True
        broken = await run_load(openai_options(server))
        server.hangs = True
        late = await run_load(openai_options(server, timeout_s=0.3, requests=2))
    assert [(error.code, error.reason, error.example, error.count) for error in refused.errors] == [
        ("HTTP 503", "overloaded", "too many", 6)
    ]
    assert [(error.code, error.count) for error in broken.errors] == [("BROKEN", 6)]
    assert broken.ttft is not None
    assert broken.e2e is None
    assert [(error.code, error.count) for error in late.errors] == [("TIMEOUT", 2)]


async def test_openai_servers_that_say_too_little() -> None:
    async with FakeOpenAi(has_tokenize=False) as server:
        with pytest.raises(ConfigError, match="pass --vocabulary-size N"):
            await run_load(openai_options(server, vocabulary_size=None))
        with pytest.raises(ConfigError, match="has no /tokenize"):
            await run_load(openai_options(server, prompt_form=PromptForm.TEXT))
        with pytest.raises(ConfigError, match=r"no model 'other' is served.*served: m"):
            await run_load(openai_options(server, model="other"))
        server.model = {"id": "m", "meta": {"n_vocab": 700}}
        server.slot_context = 27
        with pytest.raises(ConfigError, match="the model's context has 27"):
            await run_load(openai_options(server, vocabulary_size=None))
        server.model = {"id": "m", "meta": {"n_vocab": 700, "n_ctx": 28}}
        assert (await run_load(openai_options(server, vocabulary_size=None))).requests.succeeded == 6
    with pytest.raises(Unavailable, match="no HTTP server answers"):
        await run_load(openai_options(server))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:8000", Endpoint(host="localhost", port=8000, is_tls=False, prefix="")),
        ("http://h/v1/", Endpoint(host="h", port=80, is_tls=False, prefix="")),
        ("https://h/api/v1", Endpoint(host="h", port=443, is_tls=True, prefix="/api")),
        ("http://[::1]:9", Endpoint(host="::1", port=9, is_tls=False, prefix="")),
    ],
)
def test_addresses(address: str, expected: Endpoint) -> None:
    assert Endpoint.parse(address) == expected


@pytest.mark.parametrize("address", ["ftp://h", "http://", "http://h:x"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL"):
        Endpoint.parse(address)
