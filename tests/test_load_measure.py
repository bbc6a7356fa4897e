"""The load generator's books: percentiles in bounded memory, slices of time, latencies, goodput, errors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstage.bench.histogram import DurationHistogram
from twinstage.bench.measure import Books
from twinstage.bench.monitor import generator_warnings
from twinstage.bench.options import LoadOptions, Slo
from twinstage.bench.results import Distribution, GeneratorHealth
from twinstage.bench.summary import snapshot, summarize
from twinstage.bench.target import Answer, RequestFailed
from twinstage.bench.timeline import MAX_BINS, Timeline

HEALTH = GeneratorHealth(loop_share=0.1, cpu_share=0.1, loop_lag=None, start_delay=None)
DURATIONS = st.lists(st.floats(min_value=1e-6, max_value=5_000), min_size=1, max_size=60)


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- histograms and slices ------------------------------------------------------------------------


@given(DURATIONS, st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_those_of_the_sorted_values(values: list[float], percent: int) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(percent / 100 * len(values)) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0006)


@given(DURATIONS, DURATIONS)
def test_merged_histograms_are_one_of_all(first: list[float], second: list[float]) -> None:
    parts = [DurationHistogram(), DurationHistogram()]
    whole = DurationHistogram()
    for part, values in zip(parts, (first, second), strict=True):
        for value in values:
            part.add(value)
            whole.add(value)
    parts[0].merge(parts[1])
    merged, expected = parts[0].distribution(), whole.distribution()
    assert merged is not None
    assert expected is not None
    assert merged.mean_s == pytest.approx(expected.mean_s)
    assert (merged.count, merged.min_s, merged.p50_s, merged.p99_s, merged.max_s) == (
        expected.count,
        expected.min_s,
        expected.p50_s,
        expected.p99_s,
        expected.max_s,
    )


@given(DURATIONS)
def test_bars_lose_nothing(values: list[float]) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    bars = histogram.bars(10)
    assert sum(bar.count for bar in bars) == len(values)
    assert bars[-1].upper_s == max(values)
    assert [bar.upper_s for bar in bars] == sorted(bar.upper_s for bar in bars)


def test_empty_histograms() -> None:
    assert DurationHistogram().distribution() is None
    assert DurationHistogram().percentile(50) is None
    assert DurationHistogram().bars(10) == ()


def test_memory_does_not_grow_with_a_run() -> None:
    timeline, histogram = Timeline(0.0), DurationHistogram()
    for second in range(100_000):
        timeline.at(float(second)).output_tokens += 2
        histogram.add(0.001 + second % 977 / 1000)
    bins = timeline.bins()
    assert MAX_BINS / 2 <= len(bins) <= MAX_BINS
    assert sum(entry.output_tokens for entry in bins) == 200_000
    assert timeline.bin_s * len(bins) == pytest.approx(100_000, rel=0.02)
    inner = {entry.output_tokens for entry in bins[:-1]}
    assert inner == {2 * timeline.bin_s}
    assert len(histogram._buckets) <= 977


# --- latencies ------------------------------------------------------------------------------------


def answer_slowly(books: Books, clock: Clock, *, scheduled_s: float, sent_s: float) -> None:
    """Three messages of 1, 1 and 2 tokens, 0.5, 0.6 and 0.9 seconds after the request was sent; the end at 1.0."""
    clock.now_s = sent_s
    track = books.begin(scheduled_s=scheduled_s, prompt_tokens=7)
    for after_s, count in ((0.5, 1), (0.6, 1), (0.7, 0), (0.9, 2)):
        clock.now_s = sent_s + after_s
        track.tokens(count)
    clock.now_s = sent_s + 1.0
    books.succeed(track, Answer(prompt_tokens=7, output_tokens=4, phases_s={"prefill": 0.25}))


def test_latencies_count_from_the_scheduled_time(clock: Clock) -> None:
    """A request that the generator or a full place held back by 2 s has these 2 s in its latencies."""
    books = Books(clock=clock, slo=Slo(), start_s=100.0)
    answer_slowly(books, clock, scheduled_s=100.0, sent_s=102.0)
    result = summarize(
        books,
        options=LoadOptions(addresses=("a",), rate_per_s=1.0),
        model="m",
        prompt_seed=1,
        started_at=0.0,
        interrupted=False,
        health=HEALTH,
    )
    assert result.ttft is not None
    assert result.itl is not None
    assert result.tpot is not None
    assert result.e2e is not None
    assert result.ttft.p50_s == pytest.approx(2.5)
    assert result.e2e.max_s == pytest.approx(3.0)
    assert (result.itl.count, result.itl.min_s, result.itl.max_s) == (2, pytest.approx(0.1), pytest.approx(0.3))
    assert result.tpot.p50_s == pytest.approx(0.4 / 3, rel=0.001)
    assert books.start_delay.distribution() is not None
    assert books.start_delay.total_s == pytest.approx(2.0)
    assert result.duration_s == pytest.approx(3.0)
    assert result.output_tokens_per_s == pytest.approx(4 / 3)
    assert result.total_tokens_per_s == pytest.approx(11 / 3)
    assert result.tokens.messages == 3
    assert result.server["prefill"].p50_s == pytest.approx(0.25)
    assert result.started_at == "1970-01-01T00:00:00+00:00"
    assert sum(entry.output_tokens for entry in result.timeline) == 4
    assert max(entry.in_flight for entry in result.timeline) == 1
    assert result.timeline[-1].finished == 1


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_s=0.51), 2),
        (Slo(ttft_s=0.49), 0),
        (Slo(ttft_s=0.51, itl_s=0.14), 2),
        (Slo(ttft_s=0.51, itl_s=0.13), 0),
        (Slo(e2e_s=0.99), 0),
        (Slo(e2e_s=1.01), 2),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(clock: Clock, slo: Slo, good: int) -> None:
    books = Books(clock=clock, slo=slo, start_s=100.0)
    answer_slowly(books, clock, scheduled_s=100.0, sent_s=100.0)
    answer_slowly(books, clock, scheduled_s=101.0, sent_s=101.0)
    failing = books.begin(scheduled_s=102.0, prompt_tokens=7)
    books.fail(failing, RequestFailed("full", code="RESOURCE_EXHAUSTED", reason="OVERLOADED"))
    silent = books.begin(scheduled_s=102.0, prompt_tokens=7)
    books.cancel(silent)
    options = LoadOptions(addresses=("a",), rate_per_s=1.0, slo=slo)
    result = summarize(
        books, options=options, model="m", prompt_seed=1, started_at=0.0, interrupted=False, health=HEALTH
    )
    assert result.goodput is not None
    assert (result.goodput.good, result.goodput.share) == (good, pytest.approx(good / 3))
    assert result.goodput.requests_per_s == pytest.approx(good / 2)
    assert (result.requests.sent, result.requests.cancelled) == (4, 1)


def test_an_answer_without_a_token_is_not_good(clock: Clock) -> None:
    books = Books(clock=clock, slo=Slo(ttft_s=9), start_s=100.0)
    books.succeed(books.begin(scheduled_s=100.0, prompt_tokens=1), Answer())
    assert books.totals.good == 0


def test_errors_by_code_and_reason(clock: Clock) -> None:
    books = Books(clock=clock, slo=Slo(), start_s=100.0)
    for number, code in enumerate(["UNAVAILABLE", "HTTP 500", "UNAVAILABLE"]):
        track = books.begin(scheduled_s=100.0, prompt_tokens=1)
        books.fail(track, RequestFailed(f"message {number}", code=code, reason="R"))
    first, second = books.errors
    assert (first.code, first.count, first.example) == ("UNAVAILABLE", 2, "message 0")
    assert (second.code, second.count) == ("HTTP 500", 1)
    for number in range(500):
        track = books.begin(scheduled_s=100.0, prompt_tokens=1)
        books.fail(track, RequestFailed("m", code=f"code {number}"))
    assert len(books.errors) <= 51
    assert sum(error.count for error in books.errors) == books.totals.failed == 503


def test_what_the_server_counts_is_right(clock: Clock) -> None:
    """Of a server whose messages do not say how many tokens they hold, the totals come from its usage."""
    books = Books(clock=clock, slo=Slo(), start_s=100.0)
    track = books.begin(scheduled_s=100.0, prompt_tokens=7)
    for _ in range(3):
        clock.now_s += 1
        track.tokens(1)
    books.succeed(track, Answer(prompt_tokens=8, output_tokens=5, cached_prompt_tokens=3, kv_bytes=10, retries=2))
    totals = books.totals
    assert (totals.output_tokens, totals.messages, totals.prompt_tokens) == (5, 3, 8)
    assert (totals.cached_prompt_tokens, totals.kv_bytes, totals.retried, totals.wrong_length) == (3, 10, 1, 1)
    assert books.tpot.percentile(50) == pytest.approx(2 / 4, rel=0.001)


def test_a_snapshot_of_a_run_in_progress(clock: Clock) -> None:
    books = Books(clock=clock, slo=Slo(), start_s=100.0)
    track = books.begin(scheduled_s=100.0, prompt_tokens=1)
    assert snapshot(books).ttft_p50_s is None
    clock.now_s = 100.5
    track.tokens(2)
    now = snapshot(books)
    assert (now.in_flight, now.output_tokens, now.succeeded, now.itl_p50_s) == (1, 2, 0, None)
    assert (now.elapsed_s, now.ttft_p50_s) == (0.5, pytest.approx(0.5))


def test_the_steady_rate_leaves_out_the_end(clock: Clock) -> None:
    books = Books(clock=clock, slo=Slo(), start_s=100.0)
    track = books.begin(scheduled_s=100.0, prompt_tokens=1)
    clock.now_s = 110.0
    track.tokens(50)
    books.end_sending()
    clock.now_s = 114.0
    books.succeed(track, Answer())
    options = LoadOptions(addresses=("a",), concurrency=1)
    result = summarize(
        books, options=options, model="m", prompt_seed=1, started_at=0.0, interrupted=False, health=HEALTH
    )
    assert result.steady_output_tokens_per_s == pytest.approx(5.0)
    assert result.output_tokens_per_s == pytest.approx(50 / 14)


# --- the generator itself -------------------------------------------------------------------------


def distribution(seconds: float) -> Distribution:
    histogram = DurationHistogram()
    histogram.add(seconds)
    found = histogram.distribution()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("loop_share", "lag_s", "itl_s", "words"),
    [
        (0.3, 0.002, 0.02, []),
        (0.8, 0.002, 0.02, ["busy 80% of the time"]),
        (0.3, 0.050, 0.02, ["held up by 50 ms"]),
        (0.3, 0.050, 0.90, []),  # small against what is measured
    ],
)
def test_a_generator_that_was_the_bottleneck_says_so(
    loop_share: float, lag_s: float, itl_s: float, words: list[str]
) -> None:
    health = GeneratorHealth(
        loop_share=loop_share, cpu_share=loop_share, loop_lag=distribution(lag_s), start_delay=None
    )
    warnings = generator_warnings(health, distribution(itl_s))
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))
