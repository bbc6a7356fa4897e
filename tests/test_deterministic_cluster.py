"""Deterministic mode on a cluster: the bits of one process, streamed or not, in company or alone, after failover."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import ProcessCluster
from token_bits import TokenBits, bits_of_produced, bits_of_received
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

pytestmark = pytest.mark.xdist_group("deterministic")

CHUNK = 32
FLAGS = ("--deterministic", "--kv-cache-bytes", "4MiB", "--max-tokens-per-step", str(CHUNK))
LENGTHS = (2, 16, 31, 32, 33, 65, 100, 7)
SEED = 77
TOKENS = 200


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """One prefill worker and two decode workers."""
    with ProcessCluster(tmp_path_factory.mktemp("deterministic")) as cluster:
        cluster.start_workers(str(tiny_model), prefill=1, decode=2, flags=FLAGS)
        cluster.start_router()
        yield cluster


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[TokenBits]]:
    """What one process computes for each prompt."""
    options = LlmOptions(deterministic=True, threads=1, kv_cache_bytes=4 * 1024 * 1024, max_tokens_per_step=CHUNK)
    limits = GenerationLimits(max_tokens=TOKENS, ignore_eos=True)
    sampling = SamplingParameters(temperature=0.9, seed=SEED)
    with LLM(str(tiny_model), options) as llm:
        results = llm.generate([prompt_of(length) for length in LENGTHS], sampling, limits=limits, logprobs=2)
    return [bits_of_produced(result.tokens) for result in results]


def prompt_of(length: int) -> list[int]:
    return [(29 * index + 7 * length) % 380 + 3 for index in range(length)]


def request(length: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt_of(length)),
        sampling=common_pb2.SamplingOptions(temperature=0.9, seed=SEED),
        stopping=common_pb2.StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        output=common_pb2.OutputOptions(logprobs=2),
    )


def test_every_way_to_ask_gives_the_bits_of_one_process(
    cluster: ProcessCluster, expected: list[list[TokenBits]]
) -> None:
    with cluster.channel() as channel, ThreadPoolExecutor(2 * len(LENGTHS)) as threads:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        unary = [threads.submit(stub.Generate, request(length), timeout=60) for length in LENGTHS]
        streamed = [
            threads.submit(lambda length: list(stub.GenerateStream(request(length), timeout=60)), length)
            for length in LENGTHS
        ]
        for future, bits in zip(unary, expected, strict=True):
            assert bits_of_received(future.result().results[0].logprobs) == bits
        for stream, bits in zip(streamed, expected, strict=True):
            assert bits_of_received([entry for event in stream.result() for entry in event.delta.logprobs]) == bits
        for length, bits in zip(LENGTHS[:3], expected, strict=False):
            assert bits_of_received(stub.Generate(request(length), timeout=60).results[0].logprobs) == bits
    cluster.wait_idle()


def test_a_decode_worker_killed_in_mid_stream_changes_no_bit(
    cluster: ProcessCluster, expected: list[list[TokenBits]]
) -> None:
    with cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        streams = [stub.GenerateStream(request(length), timeout=60) for length in LENGTHS]
        received: list[list[common_pb2.TokenLogprob]] = [[] for _ in LENGTHS]
        for stream, so_far in zip(streams, received, strict=True):
            while len(so_far) < 2:  # the first token comes from the prefill worker
                so_far += next(iter(stream)).delta.logprobs
        victim = next(role for role in cluster.processes if role.name.startswith("decode"))
        victim.kill()
        retries = 0
        for stream, so_far, bits in zip(streams, received, expected, strict=True):
            for event in stream:
                so_far += event.delta.logprobs
                retries += event.summary.placement.retries
            assert bits_of_received(so_far) == bits
        assert retries
    cluster.wait_idle()


def test_models_and_workers_say_so(cluster: ProcessCluster) -> None:
    with cluster.channel() as channel:
        model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=10).model
    assert model.deterministic
    assert all(f"chunks of {CHUNK}," in worker.numerics for worker in cluster.workers())
