"""Log probabilities of prompts: what the model gives to each token, computed and delivered once, and in parts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_runner import drain, make_core, make_spec, prefix_logits
from flow_rig import Answer, expected_text, request, running
from harness import ProcessCluster
from router.limits import MAX_UNARY_PROMPT_LOGPROBS
from router.outbox import DeltaEvent, PromptEvent, PromptLogprobsEvent
from router.prompt_scores import check_unary_size
from tiny_models import VOCABULARY_SIZE
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.errors import ComputeFailed, InvalidRequest
from twinstage.types import ProducedToken, RawOutput, SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("tiny")

GREEDY = SamplingParameters(temperature=0.0)
# Blocks of 5 and chunks of 7 fit nothing evenly; three sequences at a time share the chunks.
OPTIONS = LlmOptions(threads=1, block_size=5, kv_cache_bytes=400_000, max_num_sequences=3, max_tokens_per_step=7)

Scored = tuple[int, float, int, list[tuple[int, float]]]  # token, log probability, rank, alternatives


def _random_prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def stock(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


@pytest.fixture(scope="module")
def caching(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), replace(OPTIONS, prefix_cache=True)) as llm:
        yield llm


def _assert_stock(stock: Any, prompt: Sequence[int], scored: Sequence[Scored], *, count: int) -> None:
    """As log_softmax of Transformers' logits says, for every token but the first."""
    with torch.no_grad():
        expected = stock(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
    assert [token_id for token_id, *_ in scored] == list(prompt[1:])
    for position, (token_id, logprob, rank, top) in enumerate(scored):
        row = expected[position]
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-3)
        near = (row - row[token_id]).abs() < 1e-3  # any order of these is right
        above = int((row > row[token_id]).sum())
        assert above - int(near.sum()) < rank <= above + int(near.sum())
        best = row.topk(count)
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert all(row[other].item() == pytest.approx(value, abs=1e-3) for other, value in top)


def _of_produced(tokens: Iterable[ProducedToken]) -> list[Scored]:
    return [
        (
            token.token_id,
            token.logprobs.logprob,
            token.logprobs.rank,
            [(t.token_id, t.logprob) for t in token.logprobs.top],
        )
        for token in tokens
        if token.logprobs is not None
    ]


def _of_messages(parts: Iterable[generation_pb2.PromptLogprobs]) -> list[Scored]:
    """All parts joined, which follow one another without a gap."""
    scored: list[Scored] = []
    for part in parts:
        assert part.start == len(scored) + 1
        scored += [(t.token_id, t.logprob, t.rank, [(o.token_id, o.logprob) for o in t.top]) for t in part.tokens]
    return scored


# --- in one process --------------------------------------------------------------------------------


def test_scores_are_those_of_stock_transformers_cold_and_warm(caching: LLM, stock: Any) -> None:
    prompts = [_random_prompt(length, seed=length) for length in (1, 2, 7, 8, 90)]
    for _ in range(2):  # the second time every prompt is known to the prefix cache
        results = caching.generate(prompts, GREEDY, max_tokens=3, prompt_logprobs=4)
        for prompt, result in zip(prompts, results, strict=True):
            _assert_stock(stock, prompt, _of_produced(result.prompt_logprobs), count=4)
    plain = caching.generate(prompts, GREEDY, max_tokens=3)
    assert [result.token_ids for result in plain] == [result.token_ids for result in results]
    assert not any(result.prompt_logprobs for result in plain)


def test_in_deterministic_mode_scores_change_no_bit_of_the_answer(tiny_model: Path, stock: Any) -> None:
    prompt = _random_prompt(40)
    with LLM(str(tiny_model), replace(OPTIONS, deterministic=True, max_tokens_per_step=16)) as llm:
        (plain,) = llm.generate([prompt], GREEDY, max_tokens=6, logprobs=2)
        scored, _ = llm.generate([prompt, prompt[:20]], GREEDY, max_tokens=6, logprobs=2, prompt_logprobs=0)
    assert scored.tokens == plain.tokens
    _assert_stock(stock, prompt, _of_produced(scored.prompt_logprobs), count=0)


def test_each_token_is_scored_once_whatever_is_computed_again() -> None:
    """Preempted while prompts are scored and after; a warm cache is filled and not looked up."""
    core, runner, pool = make_core(num_blocks=11, max_tokens_per_step=6, caches=True)
    prompts = {f"r{index}": [1 + index, *range(1, 13 + index)] for index in range(3)}
    for _ in range(2):
        for name, prompt in prompts.items():
            core.add(make_spec(name, prompt=prompt, max_tokens=9, prompt_logprobs=2))
        fresh = drain(core)
        assert not fresh.errors
        for name, prompt in prompts.items():
            tokens = [token for part in fresh.prompt_logprobs[name] for token in part.tokens()]
            assert [token.token_id for token in tokens] == prompt[1:]
            for position, token in enumerate(tokens, 1):
                logits = prefix_logits(prompt[:position]).astype(np.float64)
                assert token.logprobs is not None
                logprob = logits[prompt[position]] - np.log(np.exp(logits).sum())
                assert token.logprobs.logprob == pytest.approx(logprob, abs=1e-5)
    assert pool.num_cached > 0
    assert any(start == 0 for plan in runner.plans[len(runner.plans) // 2 :] for _, start, _, _ in plan)
    assert pool.num_free == pool.num_blocks


def test_resumed_tokens_are_no_part_of_the_prompt() -> None:
    core, _, _ = make_core(max_tokens_per_step=8)
    core.add(make_spec("r", prompt=range(1, 6), resumed=range(7, 17), max_tokens=12, prompt_logprobs=0))
    collected = drain(core)
    starts = [(part.start, part.token_ids.tolist()) for part in collected.prompt_logprobs["r"]]
    assert starts == [(1, [2, 3, 4, 5])]
    assert len(collected.tokens["r"]) == 2


def test_prompt_logits_that_are_no_numbers_fail_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _, pool = make_core()
    monkeypatch.setattr(
        "fake_runner.prefix_logits", lambda seen: prefix_logits(seen) * (np.nan if seen[:2] == [9, 1] else 1)
    )
    core.add(make_spec("bad", prompt=[9, 1, 2, 3], prompt_logprobs=1))
    core.add(make_spec("good", prompt=[1, 2], prompt_logprobs=1))
    collected = drain(core)
    assert isinstance(collected.errors["bad"], ComputeFailed)
    assert len(collected.tokens["good"]) == 8
    assert pool.num_free == pool.num_blocks


# --- between router and workers --------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["scored", "first_token", "decode 3"])
async def test_after_a_failure_they_are_computed_again_and_delivered_once(phase: str) -> None:
    async with running() as rig:
        worker = rig.cluster.decode[0] if phase.startswith("decode") else rig.cluster.prefill[0]
        go_on = worker.script.stall(phase, then=ComputeFailed("a bad moment"))
        if not phase.startswith("decode"):
            go_on.set()
        answer = Answer([])
        raw = request(6, output=RawOutput(prompt_logprobs=1))
        async with rig.generation.open(raw, timeout_s=20.0, is_streamed=True) as call:
            async for event in call.outbox.events():
                answer.events.append(event)
                if isinstance(event, DeltaEvent):
                    go_on.set()  # decode fails once the client has all that prefill made
        assert answer.text == expected_text(rig.cluster, 6)
        events = [event.logprobs for event in answer.events if isinstance(event, PromptLogprobsEvent)]
        assert [part.start for part in events] == [1, 3]
        assert [token.token_id for part in events for token in part.tokens()] == list(
            rig.cluster.prefill[0].specs[0].prompt_token_ids[1:]
        )
        assert [type(event) for event in answer.events[:3]] == [PromptEvent, PromptLogprobsEvent, PromptLogprobsEvent]
        wanted = [spec.prompt_logprobs for spec in rig.cluster.prefill[0].specs]
        assert wanted == ([1, None] if phase.startswith("decode") else [1, 1])


def test_what_is_too_large_for_a_unary_answer_is_refused_before_it_is_computed() -> None:
    fits = make_spec("r", prompt=[1] * (MAX_UNARY_PROMPT_LOGPROBS // 21 + 1), prompt_logprobs=20)
    check_unary_size([fits])
    check_unary_size([replace(fits, prompt_logprobs=None, prompt_token_ids=(1,) * 10**6)])
    with pytest.raises(InvalidRequest, match="stream") as caught:
        check_unary_size([fits, replace(fits, prompt_token_ids=(1, 1))])
    assert [violation.field for violation in caught.value.violations] == ["output.prompt_logprobs"]


def _request(prompt: Sequence[int], count: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingOptions(temperature=0),
        stopping=common_pb2.StoppingOptions(max_tokens=4, ignore_eos=True),
        output=common_pb2.OutputOptions(prompt_logprobs=count, return_token_ids=True),
    )


def test_across_both_workers_they_are_those_of_stock_transformers(tiny_cluster: ProcessCluster, stock: Any) -> None:
    """Unary and streamed, the second time with the prompt in both workers' caches; text with every token."""
    prompt = _random_prompt(200, seed=3)
    with tiny_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer = stub.Generate(_request(prompt, 3), timeout=60)
        events = list(stub.GenerateStream(_request(prompt, 20), timeout=60))
    assert answer.placement.kv_bytes > 0
    _assert_stock(stock, prompt, _of_messages(answer.prompt_logprobs), count=3)
    parts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    _assert_stock(stock, prompt, _of_messages(parts), count=20)
    assert len(parts) > 2
    assert max(part.ByteSize() for part in parts) < 64 * 1024
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "prompt_info"
    assert kinds.index("delta") > max(index for index, kind in enumerate(kinds) if kind == "prompt_logprobs")
    assert events[-1].summary.usage.cached_prompt_tokens == 0, "all of it was computed"
    assert all(token.text for part in parts for token in part.tokens)


def test_a_conversation_is_scored_as_the_prompt_that_it_is_rendered_to(tiny_cluster: ProcessCluster) -> None:
    chat = generation_pb2.ChatRequest(
        messages=[generation_pb2.ChatMessage(role="user", content="What is the capital?")],
        sampling=common_pb2.SamplingOptions(temperature=0),
        stopping=common_pb2.StoppingOptions(max_tokens=3),
        output=common_pb2.OutputOptions(prompt_logprobs=1),
    )
    with tiny_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer = stub.Chat(chat, timeout=60)
        parts = [e.prompt_logprobs for e in stub.ChatStream(chat, timeout=60) if e.HasField("prompt_logprobs")]
        assert _of_messages(parts) == _of_messages([answer.prompt_logprobs])
        assert len(answer.prompt_logprobs.tokens) == answer.usage.prompt_tokens - 1
        chat.output.ClearField("prompt_logprobs")
        assert not stub.Chat(chat, timeout=60).HasField("prompt_logprobs")
