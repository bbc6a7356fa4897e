"""The aggregated engine against stock Transformers: text or ids in, the same greedy tokens out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_models import IM_END_ID, MAX_MODEL_LEN, VOCABULARY_SIZE
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.errors import ConfigError, InvalidRequest, KvExhausted, ModelError
from twinstage.models.resolve import resolve_model
from twinstage.types import FinishReason, SamplingParameters, TextOptions

GREEDY = SamplingParameters(temperature=0.0)
# Blocks of 5 and chunks of 7 fit nothing evenly, and 3 sequences at a time make prompts and decoding mix.
OPTIONS = LlmOptions(threads=1, block_size=5, kv_cache_bytes=400_000, max_num_sequences=3, max_tokens_per_step=7)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def _stock_choices(stock: Any, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
    """The stock model's first choice in place of each token of `output`, after all before it: what greedy means."""
    with torch.no_grad():
        logits = stock(torch.tensor([[*prompt, *output]])).logits[0]
    return tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


def _random_prompts(count: int) -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, VOCABULARY_SIZE) for _ in range(draw.randint(1, 90))] for _ in range(count)]


def test_greedy_equals_stock_for_many_mixed_prompts(llm: LLM, stock: Any) -> None:
    prompts = _random_prompts(8)
    results = llm.generate(prompts, GREEDY, limits=GenerationLimits(max_tokens=50, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == tuple(prompt)
        assert len(result.token_ids) == 50
        assert result.token_ids == _stock_choices(stock, prompt, result.token_ids)
        assert result.finish.reason is FinishReason.LENGTH
    assert llm.pool.num_free == llm.pool.num_blocks


def test_preemption_does_not_change_the_tokens(tiny_model: Path, stock: Any) -> None:
    """A pool of one and a half sequences makes them take turns."""
    prompts = [prompt[:20] for prompt in _random_prompts(4)]
    options = LlmOptions(block_size=5, kv_cache_bytes=21 * 5 * 512, max_num_sequences=4, max_tokens_per_step=16)
    with LLM(str(tiny_model), options) as small:
        assert small.pool.num_blocks == 21
        results = small.generate(prompts, GREEDY, limits=GenerationLimits(max_tokens=50, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 50
        assert result.token_ids == _stock_choices(stock, prompt, result.token_ids)


def test_text_in_text_out(llm: LLM) -> None:
    prompt = "The capital of France"
    (result,) = llm.generate([prompt], GREEDY, max_tokens=12)
    assert result.prompt_token_ids == tuple(llm.tokenizer.encode(prompt))
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert len(result.token_ids) == 12


def test_choices_are_the_same_for_every_n_and_in_any_company(llm: LLM) -> None:
    sampling = SamplingParameters(temperature=1.0, seed=5)
    limits = GenerationLimits(max_tokens=12, ignore_eos=True)
    prompts = [prompt[:11] for prompt in _random_prompts(2)]
    results = llm.generate(prompts, sampling, n=3, limits=limits, logprobs=1, prompt_logprobs=0)
    assert [result.prompt_token_ids for result in results] == [tuple(prompt) for prompt in prompts for _ in range(3)]
    assert len({result.token_ids for result in results}) == 6
    for index, result in enumerate(results):
        choice = replace(sampling, choice_index=index % 3)
        (alone,) = llm.generate([prompts[index // 3]], choice, limits=limits)
        assert result.token_ids == alone.token_ids
        assert len(result.prompt_logprobs) == len(prompts[0]) - 1
        assert result.prompt_logprobs == results[index // 3 * 3].prompt_logprobs
        assert all(token.logprobs is not None for token in result.tokens)
    assert llm.pool.num_free == llm.pool.num_blocks


def test_seeded_sampling_repeats_alone_and_in_company(llm: LLM) -> None:
    prompts = _random_prompts(4)
    sampling = SamplingParameters(temperature=0.8, top_p=0.9, seed=42)
    together = llm.generate(prompts, sampling, max_tokens=20)
    alone = [llm.generate([prompt], sampling, max_tokens=20)[0] for prompt in prompts]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    other = llm.generate(prompts, SamplingParameters(temperature=0.8, top_p=0.9, seed=43), max_tokens=20)
    assert [result.token_ids for result in other] != [result.token_ids for result in together]


def test_end_of_sequence_ends_and_can_be_ignored(llm: LLM) -> None:
    favoured = SamplingParameters(temperature=0.0, logit_bias={IM_END_ID: 100.0})
    (ended,) = llm.generate([[5, 6]], favoured, max_tokens=8)
    assert (ended.finish.reason, ended.finish.matched_token_id) == (FinishReason.STOP, IM_END_ID)
    assert len(ended.tokens) == 1
    (later,) = llm.generate([[5, 6]], favoured, limits=GenerationLimits(max_tokens=8, min_tokens=3))
    assert len(later.tokens) == 4
    (ignored,) = llm.generate([[5, 6]], favoured, limits=GenerationLimits(max_tokens=8, ignore_eos=True))
    assert ignored.token_ids == (IM_END_ID,) * 8


@pytest.mark.parametrize("hit_multiple", [1, 7])
def test_a_prefix_cache_changes_what_is_computed_and_nothing_else(
    tiny_model: Path, llm: LLM, stock: Any, hit_multiple: int
) -> None:
    """Cold, warm, next turns, more prompts than the pool holds, and after a reset; greedy and seeded."""
    stem = _random_prompts(3)[2][:40]
    prompts = [[*stem[: 10 * index], *prompt[:20]] for index, prompt in enumerate(_random_prompts(5))]
    seeded = SamplingParameters(temperature=0.9, top_p=0.95, seed=5)
    options = replace(OPTIONS, kv_cache_bytes=100_000, prefix_cache=True, prefix_hit_multiple=hit_multiple)
    with LLM(str(tiny_model), options) as caching:
        for sampling in (GREEDY, seeded):
            for turn in range(3):
                limits = GenerationLimits(max_tokens=12, ignore_eos=True)
                results = caching.generate(prompts, sampling, limits=limits)
                expected = llm.generate(prompts, sampling, limits=limits)
                assert [result.token_ids for result in results] == [result.token_ids for result in expected]
                if sampling is GREEDY:
                    output = results[0].token_ids
                    assert output == _stock_choices(stock, prompts[0], output)
                if turn:
                    prompts = [
                        [*prompt, *result.token_ids][:75] for prompt, result in zip(prompts, results, strict=True)
                    ]
            assert caching.pool.prefix_lookups.found > 0
            assert caching.pool.reset_prefix_cache() > 0
        assert caching.pool.num_free == caching.pool.num_blocks


def test_a_stop_string_ends_only_its_own_prompt(llm: LLM) -> None:
    prompts = _random_prompts(3)
    free = llm.generate(prompts, GREEDY, max_tokens=30)
    stop = free[0].text[4:7]
    stopped = llm.generate(prompts, GREEDY, max_tokens=30, text=TextOptions(stop=(stop,)))
    assert stopped[0].text == free[0].text[: free[0].text.index(stop)]
    assert stopped[0].finish.matched_text == stop
    assert len(stopped[0].tokens) < 30
    assert llm.pool.num_free == llm.pool.num_blocks


def test_logprobs_come_with_every_token(llm: LLM, stock: Any) -> None:
    prompt = _random_prompts(1)[0]
    (result,) = llm.generate([prompt], GREEDY, max_tokens=5, logprobs=3)
    with torch.no_grad():
        logits = stock(torch.tensor([[*prompt, *result.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).max(-1).values
    for token, logprob in zip(result.tokens, expected, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.rank == 1
        assert token.logprobs.logprob == pytest.approx(logprob.item(), abs=1e-4)
        assert len(token.logprobs.top) == 3


def test_the_context_limit_ends_a_generation(llm: LLM) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 4)
    (result,) = llm.generate([prompt], GREEDY, limits=GenerationLimits(max_tokens=100, ignore_eos=True))
    assert result.finish.reason is FinishReason.CONTEXT_LIMIT
    assert len(result.tokens) == 4


def test_wrong_prompts_fail_and_leave_no_block_behind(llm: LLM) -> None:
    for prompt in ([], [5] * MAX_MODEL_LEN):
        with pytest.raises(InvalidRequest):
            llm.generate([[3, 4], prompt], GREEDY, max_tokens=4)
        assert llm.pool.num_free == llm.pool.num_blocks
    assert len(llm.generate([[3, 4]], GREEDY, max_tokens=4)) == 1


def test_limits_of_construction(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        LLM(str(tiny_model), LlmOptions(kv_cache_bytes=100))
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tiny_model), LlmOptions(max_model_len=MAX_MODEL_LEN + 1))
    with pytest.raises(ModelError, match="is not here"):
        LLM(str(tmp_path / "nothing"))
    with LLM(str(tiny_model), LlmOptions(max_model_len=64, kv_cache_bytes=2 * 16 * 512)) as small:
        assert small.max_model_len == 64
        with pytest.raises(KvExhausted):
            small.generate([[5] * 40], GREEDY, max_tokens=4)


@pytest.mark.real_model
def test_the_demo_model_equals_stock_transformers() -> None:
    subjects = ("the sea", "a clockmaker", "copper", "bread")
    prompts = [f"Write one sentence about {subject}." for subject in subjects]
    prompts += [f"{subject} and {subject}. " * 12 for subject in subjects]
    with LLM("demo", LlmOptions(kv_cache_bytes=64 * 1024 * 1024, max_tokens_per_step=40)) as demo:
        results = demo.generate(prompts, GREEDY, limits=GenerationLimits(max_tokens=16, ignore_eos=True))
    stock = AutoModelForCausalLM.from_pretrained(resolve_model("demo").directory, dtype=torch.float32).eval()
    for result in results:
        assert result.token_ids == _stock_choices(stock, result.prompt_token_ids, result.token_ids)
