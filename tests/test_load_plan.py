"""What the load generator plans to send: arrival times, lengths, traces, and prompts of an exact length."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from twinstage.bench.options import Arrivals, LoadOptions, TokenRange, TraceOptions
from twinstage.bench.plan import PlannedRequest, arrival_offsets, fit, number_of_requests, plan
from twinstage.bench.prompts import IdPrompts, TextPrompts, find_text_prompts, usable_ids
from twinstage.bench.trace import TraceEntry, read_trace
from twinstage.client.options import Sampling
from twinstage.errors import ConfigError

ADDRESSES = ("localhost:1",)


def planned(
    options: LoadOptions, number: int, *, trace: list[TraceEntry] | None = None, **arguments: object
) -> list[PlannedRequest]:
    limits = {"namespace": "run", "max_model_len": None, **arguments}
    return list(itertools.islice(plan(options, trace=trace, **limits), number))  # type: ignore[arg-type]


# --- arrivals -------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential() -> None:
    offsets = list(itertools.islice(arrival_offsets(50, Arrivals.POISSON, seed=3), 20_001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(offsets)]
    assert offsets[0] == 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert offsets == list(itertools.islice(arrival_offsets(50, Arrivals.POISSON, seed=3), 20_001))
    assert offsets != list(itertools.islice(arrival_offsets(50, Arrivals.POISSON, seed=4), 20_001))


def test_constant_arrivals_do_not_drift() -> None:
    offsets = arrival_offsets(3, Arrivals.CONSTANT, seed=0)
    assert next(itertools.islice(offsets, 300_000, None)) == 100_000


# --- random requests ------------------------------------------------------------------------------


def test_lengths_cover_their_range_and_follow_the_seed() -> None:
    options = LoadOptions(
        addresses=ADDRESSES, concurrency=1, prompt_tokens=TokenRange(3, 6), output_tokens=TokenRange(7, 8), requests=400
    )
    requests = planned(options, 1000)
    assert len(requests) == 400
    assert {request.prompt_tokens for request in requests} == {3, 4, 5, 6}
    assert {request.output_tokens for request in requests} == {7, 8}
    assert {request.offset_s for request in requests} == {None}
    assert requests == planned(options, 1000)
    assert {request.sampling.seed for request in requests} == {None}  # greedy: there is nothing to draw
    drawing = planned(replace(options, sampling=Sampling(temperature=0.5)), 400)
    assert len({request.sampling.seed for request in drawing}) == 400
    fixed = planned(replace(options, sampling=Sampling(temperature=0.5, seed=7)), 400)
    assert {request.sampling.seed for request in fixed} == {7}


def test_a_shared_prefix_is_a_part_of_the_prompt() -> None:
    options = LoadOptions(addresses=ADDRESSES, rate_per_s=5, prompt_tokens=TokenRange(8, 16), shared_prefix_tokens=10)
    make = IdPrompts(vocabulary_size=500, seed=1).make
    requests = planned(options, 50)
    prompts = [make(request.segments) for request in requests]
    assert [len(prompt) for prompt in prompts] == [request.prompt_tokens for request in requests]
    prefix = max(prompts, key=len)[:10]
    assert all(prompt[:10] == prefix[: len(prompt)] for prompt in prompts)
    rests = [tuple(prompt[10:]) for prompt in prompts if len(prompt) >= 14]
    assert len(set(rests)) == len(rests) > 10


def test_levels_share_the_prefix_alone() -> None:
    options = LoadOptions(addresses=ADDRESSES, concurrency=1, prompt_tokens=TokenRange(40, 40), shared_prefix_tokens=20)
    make = IdPrompts(vocabulary_size=50_000, seed=1).make
    first, second = (make(planned(options, 1, namespace=name)[0].segments) for name in ("level 1", "level 2"))
    assert first[:20] == second[:20]
    assert not set(first[20:]) & set(second[20:])


def test_number_of_requests() -> None:
    def number(**values: object) -> int | None:
        return number_of_requests(LoadOptions(addresses=ADDRESSES, **values))  # type: ignore[arg-type]

    assert number(concurrency=2) == 20
    assert number(concurrency=32) == 128
    assert number(rate_per_s=7.5) == 150
    assert number(concurrency=2, duration_s=5) is None
    assert number(concurrency=2, duration_s=5, requests=3) == 3


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    options = LoadOptions(addresses=ADDRESSES, concurrency=1, prompt_tokens=TokenRange(50, 100))
    assert planned(options, 1, max_model_len=228)
    with pytest.raises(ConfigError, match="need up to 228 tokens; the model's context has 227"):
        planned(options, 1, max_model_len=227)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "say how to load the server"),
        ({"concurrency": 1, "rate_per_s": 1.0}, "exclude each other"),
        ({"concurrency": 0}, "--concurrency: must be at least 1"),
        ({"rate_per_s": float("nan")}, "--rate: must be above 0"),
        ({"concurrency": 1, "max_in_flight": 2}, "--max-in-flight belongs to --rate"),
        ({"concurrency": 1, "duration_s": 0.0}, "--duration: must be above 0"),
        ({"addresses": (), "concurrency": 1}, "--address: name at least one server"),
        ({"trace": TraceOptions(path=Path("t"), scale=0)}, "--trace-speed and --trace-scale"),
        ({"trace": TraceOptions(path=Path("t")), "shared_prefix_tokens": 1}, "a trace says itself"),
    ],
)
def test_options_that_mean_nothing(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**{"addresses": ADDRESSES, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "x", "5:", "0", "9:5", "-3", "1:2:3"])
def test_lengths_that_mean_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens: "):
        TokenRange.parse(text, flag="--prompt-tokens")


# --- traces ---------------------------------------------------------------------------------------


def write_trace(path: Path, *entries: object) -> Path:
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return path


def entry(timestamp: float, input_length: int, output_length: int, hash_ids: list[int]) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def test_a_trace_keeps_times_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.jsonl",
        entry(1000, 1400, 640, [0, 1, 2]),
        "",
        entry(3000, 1536, 64, [0, 1, 9]),
        entry(3000, 700, 6, [5, 1]),
    )
    options = LoadOptions(addresses=ADDRESSES, trace=TraceOptions(path=path, speed=4, scale=64))
    requests = planned(options, 10, trace=read_trace(path))
    assert [request.offset_s for request in requests] == [0, 0.5, 0.5]
    assert [request.prompt_tokens for request in requests] == [22, 24, 11]
    assert [request.output_tokens for request in requests] == [10, 1, 1]
    make = IdPrompts(vocabulary_size=50_000, seed=0).make
    first, second, third = (make(request.segments) for request in requests)
    assert first[:16] == second[:16]  # blocks 0 and 1, of 512 / 64 tokens each
    assert not set(first[16:]) & set(second[16:])
    assert third[8:] == first[8:11]  # block 1 again, behind another one
    assert third[:8] != first[:8]


@pytest.mark.parametrize("scale", [1, 3, 7.3, 100])
def test_equal_prefixes_stay_equal_at_any_scale(tmp_path: Path, scale: float) -> None:
    path = write_trace(tmp_path / "t", entry(0, 2048, 1, [1, 2, 3, 4]), entry(0, 1537, 1, [1, 2, 3, 5]))
    options = LoadOptions(addresses=ADDRESSES, trace=TraceOptions(path=path, scale=scale))
    make = IdPrompts(vocabulary_size=10**6, seed=0).make
    first, second = (make(request.segments) for request in planned(options, 2, trace=read_trace(path)))
    assert (len(first), len(second)) == (round(2048 / scale), round(1537 / scale))
    shared = min(round(1536 / scale), len(second))
    assert first[:shared] == second[:shared]


def test_a_trace_without_blocks_shares_nothing(tmp_path: Path) -> None:
    plain = {"timestamp": 0, "input_length": 30, "output_length": 2}
    path = write_trace(tmp_path / "t", plain, plain)
    options = LoadOptions(addresses=ADDRESSES, trace=TraceOptions(path=path))
    make = IdPrompts(vocabulary_size=10**6, seed=0).make
    first, second = (make(request.segments) for request in planned(options, 2, trace=read_trace(path)))
    assert len(first) == len(second) == 30
    assert not set(first) & set(second)


def test_a_trace_in_a_closed_loop_has_no_times(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", entry(5, 10, 1, [1]), entry(90, 10, 1, [1]))
    options = LoadOptions(addresses=ADDRESSES, concurrency=3, trace=TraceOptions(path=path))
    assert [request.offset_s for request in planned(options, 9, trace=read_trace(path))] == [None, None]


def test_a_trace_is_cut_to_the_context(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", entry(0, 1000, 10, [1, 2]), entry(0, 90, 10, [3]))
    options = LoadOptions(addresses=ADDRESSES, trace=TraceOptions(path=path))
    cut, whole = planned(options, 2, trace=read_trace(path), max_model_len=100)
    assert (cut.prompt_tokens, cut.output_tokens, cut.was_capped) == (90, 10, True)
    assert (whole.prompt_tokens, whole.output_tokens, whole.was_capped) == (90, 10, False)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((10, 10), (10, 10)), ((10, 500), (10, 90)), ((70, 60), (50, 50)), ((500, 500), (50, 50)), ((500, 3), (97, 3))],
)
def test_lengths_that_fit(lengths: tuple[int, int], expected: tuple[int, int]) -> None:
    assert fit(*lengths, max_model_len=100) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", r"line 2: expected a JSON object, not \[1\]"),
        ({"input_length": 5, "output_length": 5}, "line 2: timestamp must be milliseconds, not None"),
        (entry(0, 0, 5, []), "line 2: input_length must be a whole number of tokens of at least 1, not 0"),
        (entry(0, 5, 2.5, []), "line 2: output_length must be"),  # type: ignore[arg-type]
        (entry(0, 513, 5, [1]), "line 2: hash_ids has 1 entries; 513 tokens have 2 blocks of 512"),
        (entry(0, 5, 5, ["a"]), "line 2: hash_ids must be a list of whole numbers"),  # type: ignore[list-item]
        (entry(-1, 5, 5, [1]), "line 2: timestamp must be milliseconds, not -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write_trace(tmp_path / "t", entry(0, 5, 5, [1]), line)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1


def test_a_trace_that_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(write_trace(tmp_path / "empty", ""))
    with pytest.raises(ConfigError, match="line 2: timestamp 3 comes after 9; sort"):
        read_trace(write_trace(tmp_path / "t", entry(9, 5, 5, [1]), entry(3, 5, 5, [1])))


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "overhead"),
    [
        (lambda text: 1 + len(text.split()), 1),  # a word is a token, after a BOS
        (len, 0),  # a byte is a token
        (lambda text: len(text.split()) + 4 * text.count(" people") + text.count(" who"), 0),  # some words are more
    ],
)
async def test_texts_have_the_wanted_number_of_tokens(count: object, overhead: int) -> None:
    async def count_tokens(text: str) -> int:
        return count(text)  # type: ignore[operator, no-any-return]

    prompts = await find_text_prompts(count_tokens, seed=0)
    assert prompts.overhead == overhead
    options = LoadOptions(addresses=ADDRESSES, concurrency=1, prompt_tokens=TokenRange(2, 90), shared_prefix_tokens=9)
    for request in planned(options, 20):
        assert count(prompts.make(request.segments)) == request.prompt_tokens  # type: ignore[operator]


async def test_a_tokenizer_without_additive_pieces_is_refused() -> None:
    async def count_tokens(text: str) -> int:
        return 2 * len(text)

    with pytest.raises(ConfigError, match="--prompt-form ids"):
        await find_text_prompts(count_tokens, seed=0)


def test_texts_share_what_ids_share() -> None:
    options = LoadOptions(addresses=ADDRESSES, concurrency=1, prompt_tokens=TokenRange(60, 60), shared_prefix_tokens=30)
    make = TextPrompts(pieces=("a", "b", "c", "d"), overhead=1, seed=0).make
    first, second = (make(request.segments) for request in planned(options, 2))
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]


@pytest.mark.parametrize("size", [2, 10, 257, 49152])
def test_ids_are_inside_the_vocabulary(size: int) -> None:
    low, high = usable_ids(size)
    assert 0 <= low < high <= size
