"""Without deterministic mode, disaggregated equals aggregated up to the last bits of logits, which batches change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import ProcessCluster
from token_bits import bits_of_produced, bits_of_received
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("demo"), pytest.mark.timeout(300)]

PROMPTS = ("The sea is", "Name three metals.", "Once there was a clockmaker, and", "Two rivers meet where")
MAX_TOKENS = 24
NEAR_TIE = 1e-4  # of two log probabilities; batches move them by about 1e-6


def test_tokens_are_equal_up_to_a_near_tie_and_logprobs_nearly(demo_cluster: ProcessCluster) -> None:
    with LLM("demo", LlmOptions(threads=1, kv_cache_bytes=64 * 1024 * 1024)) as llm:
        results = llm.generate(PROMPTS, SamplingParameters(temperature=0.0), max_tokens=MAX_TOKENS, logprobs=2)
    with demo_cluster.channel() as channel, ThreadPoolExecutor(len(PROMPTS)) as threads:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def generate(prompt: str) -> generation_pb2.GenerateResponse:
            request = generation_pb2.GenerateRequest(
                model="SmolLM2-135M-Instruct",
                prompt=prompt,
                sampling=common_pb2.SamplingOptions(temperature=0.0),
                stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS),
                output=common_pb2.OutputOptions(logprobs=2),
            )
            return stub.Generate(request, timeout=120)

        responses = list(threads.map(generate, PROMPTS))
    num_compared = 0
    for result, response in zip(results, responses, strict=True):
        for ours, theirs in zip(
            bits_of_produced(result.tokens), bits_of_received(response.results[0].logprobs), strict=False
        ):
            (_, first), (_, second) = ours[3]
            if first - second < NEAR_TIE:
                break
            assert theirs[0] == ours[0]
            assert theirs[1] == pytest.approx(ours[1], abs=NEAR_TIE)
            num_compared += 1
    assert num_compared > len(PROMPTS) * MAX_TOKENS / 2
