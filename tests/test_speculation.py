"""Speculative decoding: the answer is the one without it, bit by bit, and what it costs is bounded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.config import DecodeSettings
from fake_runner import (
    BLOCK_SIZE,
    VOCAB,
    FakeRunner,
    drain,
    generate_alone,
    make_spec,
    prefix_logits,
)
from harness import ProcessCluster
from tiny_models import VOCABULARY_SIZE
from twinstage.cli.cluster_flags import EngineFlags
from twinstage.engine.core import EngineConfig, EngineCore
from twinstage.engine.draft_model import ModelDrafter
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.engine.ngram import find_continuation
from twinstage.engine.sequence import Sequence
from twinstage.engine.speculation import Drafter, Speculation, SpeculationOptions
from twinstage.errors import ConfigError
from twinstage.hosting.assemble import EngineParts, build_engine
from twinstage.hosting.found_model import find_model
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.settings import read_settings
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.text.same_tokens import check_same_tokens
from twinstage.types import RequestId, Role, SamplingParameters, SequenceSpec, TextOptions
from twinstage.types.constraints import RawStructuredOutput
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

MAX_MODEL_LEN = 40
OPTIONS = SpeculationOptions(method="ngram", num_tokens=4, max_sequences=3)


class Oracle:
    """Guesses what `answers` say, each token with a chance to be wrong."""

    cost = 0.0

    def __init__(self, answers: dict[RequestId, list[int]], *, wrong: float) -> None:
        self.answers = answers
        self.wrong = wrong
        self.forgotten: list[RequestId] = []
        self._draw = random.Random(5)

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        proposals = []
        for sequence, count in wanted:
            start = len(sequence.output_token_ids)
            rest = self.answers[sequence.request_id][start : start + count]
            proposals.append([(token + 1) % VOCAB if self._draw.random() < self.wrong else token for token in rest])
        return proposals

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.request_id)


def make_engine(
    drafter: Drafter, *, num_blocks: int = 64, caches: bool = False, max_model_len: int = MAX_MODEL_LEN
) -> tuple[EngineCore, FakeRunner, BlockPool]:
    pool = BlockPool(num_blocks)
    runner = FakeRunner(pool)
    config = EngineConfig(
        max_num_sequences=4, max_tokens_per_step=8, max_model_len=max_model_len, block_size=BLOCK_SIZE
    )
    speculation = Speculation(drafter, OPTIONS, block_size=BLOCK_SIZE, max_model_len=max_model_len)
    hasher = PrefixHasher("fake", block_size=BLOCK_SIZE) if caches else None
    return EngineCore(runner, pool, config, hasher=hasher, speculation=speculation), runner, pool


SAMPLING = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
    logit_bias=st.sampled_from([{}, {3: 2.0, 5: -100.0}]),
)


@st.composite
def specs(draw: st.DrawFn) -> list[SequenceSpec]:
    count = draw(st.integers(1, 4))
    requests = []
    for index in range(count):
        max_tokens = draw(st.integers(1, 45))
        spec = make_spec(
            f"r{index}",
            prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)),
            max_tokens=max_tokens,
            stop=draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
            min_tokens=draw(st.integers(0, min(6, max_tokens))),
        )
        requests.append(replace(spec, sampling=draw(SAMPLING), logprobs=draw(st.sampled_from([None, 2]))))
    return requests


@settings(max_examples=30, deadline=None)
@given(requests=specs(), wrong=st.sampled_from([0.0, 0.3, 0.9]), num_blocks=st.integers(11, 40), caches=st.booleans())
def test_random_requests_get_the_answer_that_they_get_without_it(
    requests: list[SequenceSpec], wrong: float, num_blocks: int, caches: bool
) -> None:
    """With pools so small that sequences are preempted, stop tokens among guesses, and caches that are used again."""
    expected = {spec.request_id: generate_alone(spec, max_model_len=MAX_MODEL_LEN) for spec in requests}
    oracle = Oracle({name: tokens for name, (tokens, _) in expected.items()}, wrong=wrong)
    core, _, pool = make_engine(oracle, num_blocks=num_blocks, caches=caches)
    for _ in range(2 if caches else 1):
        for spec in requests:
            core.add(spec)
        collected = drain(core)
        assert not collected.errors
        assert {name: (collected.tokens[name], collected.finish[name]) for name in expected} == expected
        assert pool.num_free == pool.num_blocks
    assert {spec.request_id for spec in requests} <= set(oracle.forgotten)


def test_right_guesses_save_steps_and_are_counted() -> None:
    spec = make_spec("r", prompt=[1, 2, 3], max_tokens=33)
    tokens, _ = generate_alone(spec, max_model_len=MAX_MODEL_LEN)
    core, runner, _ = make_engine(Oracle({spec.request_id: tokens}, wrong=0.0))
    core.add(spec)
    stats = []
    while core.has_work:
        stats += core.step().finished
    assert len(runner.plans) <= 1 + 33 // 5 + 3
    assert stats[0].accepted_draft_tokens == stats[0].proposed_draft_tokens > 20


class Wrong:
    """Guesses what cannot come."""

    cost = 0.0

    def __init__(self) -> None:
        self.asked: list[int] = []  # of so many sequences

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        self.asked.append(len(wanted))
        return [[int(prefix_logits(sequence.token_ids).argmin())] * count for sequence, count in wanted]

    def forget(self, sequence: Sequence) -> None: ...


class Broken(Wrong):
    """Cannot guess."""

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        super().propose(wanted)
        raise RuntimeError("no idea")


def test_wrong_guesses_are_soon_given_up() -> None:
    """A step with a guess now and then is what a sequence pays that nobody can guess."""
    core, _, _ = make_engine(Wrong(), num_blocks=100, max_model_len=300)
    core.add(make_spec("r", prompt=[1], max_tokens=10_000))
    stats = []
    while core.has_work:
        stats += core.step().finished
    assert 0 < stats[0].proposed_draft_tokens < 45
    assert stats[0].accepted_draft_tokens == 0


def test_large_batches_are_not_guessed_for() -> None:
    drafter = Wrong()
    core, _, _ = make_engine(drafter)
    for index in range(4):
        core.add(make_spec(f"r{index}", prompt=[index], max_tokens=8 + index))
    collected = drain(core)
    for index in range(4):
        spec = make_spec(f"r{index}", prompt=[index], max_tokens=8 + index)
        assert collected.tokens[f"r{index}"] == generate_alone(spec)[0]
    assert 0 < max(drafter.asked) <= OPTIONS.max_sequences


def test_a_drafter_that_breaks_ends_no_request() -> None:
    drafter = Broken()
    core, _, _ = make_engine(drafter)
    core.add(make_spec("r"))
    collected = drain(core)
    assert collected.tokens["r"] == generate_alone(make_spec("r"))[0]
    assert len(drafter.asked) == 1


# --- n-grams ---------------------------------------------------------------------------------------


@given(
    known=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    count=st.integers(1, 5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_a_continuation_is_what_followed_the_longest_end_that_occurred_before(
    known: list[int], count: int, shortest: int, more: int
) -> None:
    found = find_continuation(np.asarray(known), count, longest=shortest + more, shortest=shortest)
    for size in range(min(shortest + more, len(known)), shortest - 1, -1):
        ends = [end for end in range(size, len(known)) if known[end - size : end] == known[-size:]]
        if ends:
            assert found in [known[end : end + count] for end in ends]
            assert len(found) == max(min(count, len(known) - end) for end in ends)
            return
    assert found == []


# --- a draft model ---------------------------------------------------------------------------------


def make_model_drafter(*, num_blocks: int, num_tokens: int = VOCAB) -> tuple[ModelDrafter, BlockPool]:
    """A draft model that computes as the model that checks it."""
    pool = BlockPool(num_blocks)
    drafter = ModelDrafter(
        FakeRunner(pool), pool, block_size=BLOCK_SIZE, num_tokens=num_tokens, max_model_len=MAX_MODEL_LEN, cost=0.0
    )
    return drafter, pool


@settings(max_examples=15, deadline=None)
@given(requests=specs(), draft_blocks=st.integers(3, 40), shared=st.sampled_from([VOCAB, VOCAB - 6]))
def test_a_draft_model_follows_its_sequences_through_everything(
    requests: list[SequenceSpec], draft_blocks: int, shared: int
) -> None:
    """Its runner checks that its blocks hold the sequence; ids that it does not know never reach it."""
    drafter, draft_pool = make_model_drafter(num_blocks=draft_blocks, num_tokens=shared)
    core, _, pool = make_engine(drafter, num_blocks=14)
    for spec in requests:
        core.add(spec)
    collected = drain(core)
    draft_pool.check_integrity()
    for spec in requests:
        expected = generate_alone(spec, max_model_len=MAX_MODEL_LEN)
        assert (collected.tokens[spec.request_id], collected.finish[spec.request_id]) == expected
    assert (pool.num_free, draft_pool.num_free) == (pool.num_blocks, draft_pool.num_blocks)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_draft_model_that_agrees_is_always_right(temperature: float) -> None:
    """Drawn at random as well: both use the same random numbers."""
    drafter, _ = make_model_drafter(num_blocks=40)
    core, runner, _ = make_engine(drafter)
    core.add(make_spec("r", prompt=range(10), max_tokens=24, temperature=temperature, seed=3))
    stats = []
    while core.has_work:
        stats += core.step().finished
    assert stats[0].accepted_draft_tokens == stats[0].proposed_draft_tokens >= 16
    assert len(runner.plans) < 12


# --- on a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_model_answers_the_same_with_it(quick_model: Path, quick_reference: LLM, method: str) -> None:
    """On own kernels, whose rows depend on nothing else: tokens and log probabilities, to the last bit."""
    draw = random.Random(8)
    words = [[draw.randrange(3, VOCABULARY_SIZE) for _ in range(6)] for _ in range(3)]
    prompts = [[*words[0], *words[1], *words[0]], words[2] * 4]  # larger batches are guessed for less
    speculation = SpeculationOptions(method="ngram", ngram_min=1, num_tokens=3)
    if method == "draft_model":
        speculation = SpeculationOptions(
            method="draft_model",
            draft_model=str(quick_model),
            draft_weights="stock",
            draft_kv_cache_bytes=2_000_000,
            draft_cost=0.0,  # it is the same model, which would not pay
        )
    options = LlmOptions(weights="fp32", kv_cache_bytes=8_000_000, threads=1, speculation=speculation)
    accepted = 0
    with LLM(str(quick_model), options) as llm:
        for sampling in (
            SamplingParameters(temperature=0.0),
            SamplingParameters(temperature=0.8, top_p=0.9, seed=4, frequency_penalty=0.3),
            SamplingParameters(temperature=0.0, logit_bias={7: 100.0}),  # one token for ever
        ):
            limits = GenerationLimits(max_tokens=20, ignore_eos=True)
            expected = quick_reference.generate(prompts, sampling, limits=limits, logprobs=2)
            results = llm.generate(prompts, sampling, limits=limits, logprobs=2)
            assert [result.tokens for result in results] == [result.tokens for result in expected]
            accepted += sum(result.accepted_draft_tokens for result in results)
            stop = TextOptions(stop=(expected[0].text[6:9],))  # inside of what came in one step
            expected = quick_reference.generate(prompts, sampling, limits=limits, text=stop)
            results = llm.generate(prompts, sampling, limits=limits, text=stop)
            assert [(r.text, r.tokens, r.finish) for r in results] == [(r.text, r.tokens, r.finish) for r in expected]
        # Choices of a prompt that hold to a grammar: each guess is judged where the ones before it have led.
        shape = RawStructuredOutput.regex("(one two one three ){2,}end")
        for seed in (1, 2):
            sampling = SamplingParameters(temperature=1.5, seed=seed)
            expected = quick_reference.generate(prompts[:1], sampling, n=2, max_tokens=30, structured_output=shape)
            results = llm.generate(prompts[:1], sampling, n=2, max_tokens=30, structured_output=shape)
            assert [result.tokens for result in results] == [result.tokens for result in expected]
            if method == "ngram":
                assert sum(result.accepted_draft_tokens for result in results) > 5
    assert accepted > 20


def test_what_cannot_be_is_refused_by_name(tiny_model: Path) -> None:
    for flags, named in (
        (["--speculative", "mtp"], "mtp"),
        (["--speculative", "draft-model"], "--speculative"),
        (["--speculative", "draft_model"], "--draft-model"),
        (["--draft-model", "x"], "--speculative draft_model"),
        (["--speculative", "ngram", "--ngram-max", "1"], "--ngram-min"),
    ):
        with pytest.raises(ConfigError, match=named):
            read_settings(DecodeSettings, flags)
    read = read_settings(DecodeSettings, ["--speculative", "ngram", "--num-speculative-tokens", "5"])
    assert read.speculation == SpeculationOptions(method="ngram", num_tokens=5)
    assert read_settings(DecodeSettings, []).speculation is None
    flags = EngineFlags(speculative="draft_model", draft_model="small", ngram_max=5).speculation_flags
    assert flags == ("--speculative", "draft_model", "--draft-model", "small", "--ngram-max", "5")
    assert EngineFlags().speculation_flags == ()
    ngram = SpeculationOptions(method="ngram")
    with pytest.raises(ConfigError, match="deterministic"):
        LLM(str(tiny_model), LlmOptions(deterministic=True, kv_cache_bytes=400_000, speculation=ngram))


def test_a_draft_model_with_other_tokens_is_refused_with_the_first_that_differs(tiny_model: Path) -> None:
    bundle = read_bundle(tiny_model)
    check_same_tokens(bundle, replace(bundle, chat_template="another"), names=("big", "small"))
    for changed, said in (
        (bundle.tokenizer_json.replace('"<|im_end|>"', '"<|stop|>"'), "no token"),
        (_with_swapped_ids(bundle), "'%' is id 7 in big and id 8 in small"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check_same_tokens(bundle, replace(bundle, tokenizer_json=changed), names=("big", "small"))
        assert f"{VOCABULARY_SIZE} and {VOCABULARY_SIZE} tokens" in str(caught.value)


def test_a_decode_worker_is_built_with_its_draft_model_or_not_at_all(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(tiny_model), "--weights", "stock", "--threads", "1", "--kv-cache-bytes", "400KB"]
    flags += ["--speculative", "draft_model", "--draft-weights", "stock", "--draft-kv-cache-bytes", "400KB"]

    def build(draft: Path) -> EngineParts:
        decode = read_settings(DecodeSettings, [*flags, "--draft-model", str(draft)])
        found = find_model(decode)
        return build_engine(decode, found, role=Role.DECODE, protocol_version=1, speculation=decode.speculation)[0]

    parts = build(tiny_model)
    parts.core.add(make_spec("r", prompt=range(3, 30), max_tokens=12))
    stats = []
    while parts.core.has_work:
        stats += parts.core.step().finished
    # A guess of a model of the same size costs as much as it saves, so it is only tried.
    assert stats[0].proposed_draft_tokens == stats[0].accepted_draft_tokens == 1
    assert parts.close() == 0
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    (other / "tokenizer.json").write_text(_with_swapped_ids(read_bundle(tiny_model)))
    with pytest.raises(ConfigError, match="'%' is id 7"):
        build(other)


def _with_swapped_ids(bundle: TokenizerBundle) -> str:
    tokenizer = json.loads(bundle.tokenizer_json)
    vocabulary = tokenizer["model"]["vocab"]
    swapped = {7: 8, 8: 7}
    tokenizer["model"]["vocab"] = {token: swapped.get(index, index) for token, index in vocabulary.items()}
    return json.dumps(tokenizer)


def test_a_cluster_counts_guesses_in_usage(prepared_tiny_model: Path, tmp_path: Path) -> None:
    """Through real processes: the flag, the worker, its totals, the router's account."""
    request = generation_pb2.GenerateRequest(
        prompt="one two one two one two",
        sampling=common_pb2.SamplingOptions(temperature=0, logit_bias={9: 100.0}),
        stopping=common_pb2.StoppingOptions(max_tokens=40, ignore_eos=True),
        output=common_pb2.OutputOptions(return_token_ids=True),
    )
    with ProcessCluster(tmp_path) as cluster:
        flags = ("--kv-cache-bytes", "4MiB", "--weights", "fp32")
        guessing = ("--speculative", "ngram", "--num-speculative-tokens", "3")
        cluster.start_workers(str(prepared_tiny_model), prefill=1, decode=1, flags=flags, decode_flags=guessing)
        cluster.start_router()
        with cluster.channel() as channel:
            answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
    assert list(answer.results[0].token_ids) == [9] * 40
    assert 0 < answer.usage.accepted_draft_tokens <= answer.usage.proposed_draft_tokens
