"""Real workers with packed weights: what they produce together is what one process produces with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_models import tiny_config
from harness import ProcessCluster
from tiny_models import make_tiny_model
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("fused")

PROMPTS = ("What is the capital of France?", "Once upon a time there was", "A router accepts requests")
MAX_TOKENS = 24


@pytest.mark.parametrize("weights", ["int8", "fp32"])
def test_disaggregated_equals_one_process(weights: str, tmp_path: Path) -> None:
    config = tiny_config("llama", hidden_size=96, intermediate_size=160)
    directory = str(make_tiny_model(tmp_path / "llama", config, weight_scale=3.0))
    with LLM(directory, LlmOptions(weights=weights, kv_cache_bytes=8_000_000, threads=1)) as llm:
        limits = GenerationLimits(max_tokens=MAX_TOKENS, ignore_eos=True)
        expected = [
            result.token_ids for result in llm.generate(PROMPTS, SamplingParameters(temperature=0.0), limits=limits)
        ]
    assert len(set(expected)) == len(PROMPTS)
    with ProcessCluster(tmp_path) as cluster:
        cluster.start_workers(directory, flags=("--kv-cache-bytes", "8MiB", "--weights", weights))
        cluster.start_router()
        with cluster.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            calls = [stub.Generate.future(_request(prompt), timeout=60) for prompt in PROMPTS]
            responses = [call.result() for call in calls]
        cluster.wait_idle()
    assert [tuple(response.results[0].token_ids) for response in responses] == expected
    for response in responses:
        assert response.placement.decode_computed_prompt_tokens == 0
        assert response.placement.kv_bytes > 0


def _request(prompt: str) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.SamplingOptions(temperature=0.0),
        stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS, ignore_eos=True),
        output=common_pb2.OutputOptions(return_token_ids=True),
    )
