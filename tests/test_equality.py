"""Disaggregated == aggregated == stock Transformers, on the real model, over both transports, in deterministic mode.

Tokens and log probabilities are compared bit by bit, though neither side has the batches of the other.

Each disaggregated answer also proves its hand-over: the decode worker computed no prompt token itself, and the bytes
it received are blocks of the prompt, those that it lacked. The greedy answers come from caches that are cold but for
what the prompts have in common, the seeded ones, of a few prompts of every form, from warm caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import ProcessCluster
from token_bits import TokenBits, bits_of_produced, bits_of_received
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.models.resolve import resolve_model
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("equality"), pytest.mark.timeout(400)]

MAX_TOKENS = 24
LOGPROBS = 2
BLOCK_SIZE = 16
CHUNK = 32  # tokens; in deterministic mode known beginnings end at a multiple of it
# Keys and values of 30 layers with 3 heads of 64 dimensions, in fp32: what SmolLM2-135M keeps of a block's tokens.
BLOCK_BYTES = 2 * 30 * 3 * 64 * 4 * BLOCK_SIZE
SEEDED = SamplingParameters(temperature=0.9, top_p=0.95, seed=20_240_229)
SUBJECTS = ("the sea", "a clockmaker", "winter wheat", "the night train", "an old map", "copper", "two rivers", "bread")
FORMS = (
    "{0}",
    "Write one sentence about {0}.",
    "Question: what do people say about {0} when nobody listens?\nAnswer:",
    "Once, long before anyone had written it down, there was {0}. " * 4 + "And then",
)
PROMPTS = [form.format(subject) for form in FORMS for subject in SUBJECTS]
WARM = range(3, len(PROMPTS), 4)  # what is asked for a second time; most of these answers are longer than a token


@pytest.fixture(scope="module")
def aggregated() -> LLM:
    # One thread, like the workers: more would only fight with what else the tests run on this machine.
    return LLM("demo", LlmOptions(threads=1, deterministic=True, max_tokens_per_step=CHUNK))


@pytest.fixture(scope="module")
def greedy_reference(aggregated: LLM) -> list[list[TokenBits]]:
    results = aggregated.generate(
        PROMPTS, SamplingParameters(temperature=0.0), max_tokens=MAX_TOKENS, logprobs=LOGPROBS
    )
    return [bits_of_produced(result.tokens) for result in results]


@pytest.fixture(scope="module")
def seeded_reference(aggregated: LLM) -> list[list[TokenBits]]:
    results = aggregated.generate([PROMPTS[index] for index in WARM], SEEDED, max_tokens=MAX_TOKENS, logprobs=LOGPROBS)
    return [bits_of_produced(result.tokens) for result in results]


@pytest.fixture(scope="module", params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp(f"equality-{transport}")) as cluster:
        flags = ("--kv-transports", transport, "--kv-cache-bytes", "512MiB")
        cluster.start_workers("demo", flags=(*flags, "--deterministic", "--max-tokens-per-step", str(CHUNK)))
        cluster.start_router()
        yield cluster


def _generate_all(
    cluster: ProcessCluster, prompts: list[str], sampling: common_pb2.SamplingOptions
) -> list[generation_pb2.GenerateResponse]:
    with cluster.channel() as channel, ThreadPoolExecutor(len(prompts)) as threads:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def generate(prompt: str) -> generation_pb2.GenerateResponse:
            request = generation_pb2.GenerateRequest(
                prompt=prompt,
                sampling=sampling,
                stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS),
                output=common_pb2.OutputOptions(logprobs=LOGPROBS),
            )
            return stub.Generate(request, timeout=240)

        return list(threads.map(generate, prompts))


@pytest.fixture(scope="module")
def cold_greedy(cluster: ProcessCluster) -> list[generation_pb2.GenerateResponse]:
    """The first answers of the cluster."""
    return _generate_all(cluster, PROMPTS, common_pb2.SamplingOptions(temperature=0.0))


def _check_hand_over(
    transport: str,
    responses: list[generation_pb2.GenerateResponse],
    *,
    before: list[generation_pb2.GenerateResponse] | None = None,
) -> None:
    """`before` are the answers to the same prompts that warmed the caches."""
    for index, response in enumerate(responses):
        placement, usage = response.placement, response.usage
        # An answer that was one token long was not handed over: the decode worker has not seen its prompt.
        is_warm = before is not None and before[index].usage.completion_tokens > 1
        if usage.completion_tokens > 1:
            assert placement.transport == transport
            assert placement.decode_computed_prompt_tokens == 0
            blocks, rest = divmod(placement.kv_bytes, BLOCK_BYTES)
            assert rest == 0
            if is_warm:  # all but the chunk that is not full
                known = usage.prompt_tokens // CHUNK * CHUNK // BLOCK_SIZE
                assert blocks == math.ceil(usage.prompt_tokens / BLOCK_SIZE) - known
                assert usage.cached_prompt_tokens == (usage.prompt_tokens - 1) // CHUNK * CHUNK
            else:
                assert blocks <= math.ceil(usage.prompt_tokens / BLOCK_SIZE)


def _differ_in_their_first_block(responses: list[generation_pb2.GenerateResponse]) -> bool:
    """Whether some prompt was handed over as a whole."""
    return any(
        response.placement.kv_bytes == math.ceil(response.usage.prompt_tokens / BLOCK_SIZE) * BLOCK_BYTES
        for response in responses
        if response.usage.prompt_tokens > BLOCK_SIZE
    )


def test_greedy_is_what_stock_transformers_would_choose(
    greedy_reference: list[list[TokenBits]], aggregated: LLM
) -> None:
    """Given the same prefix, the stock model's most likely token is the one that was produced, at every position."""
    stock = AutoModelForCausalLM.from_pretrained(resolve_model("demo").directory, dtype=torch.float32)
    for prompt, bits in zip(PROMPTS, greedy_reference, strict=True):
        output = [token_id for token_id, *_ in bits]
        prompt_ids = aggregated.tokenizer.encode(prompt)
        with torch.inference_mode():
            logits = stock(torch.tensor([[*prompt_ids, *output]])).logits[0]
        expected = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1).tolist()
        assert output == expected, prompt


def test_greedy_disaggregated_equals_aggregated(
    cluster: ProcessCluster,
    transport: str,
    greedy_reference: list[list[TokenBits]],
    cold_greedy: list[generation_pb2.GenerateResponse],
) -> None:
    decode = next(role for role in cluster.processes if role.name.startswith("decode"))
    assert [bits_of_received(response.results[0].logprobs) for response in cold_greedy] == greedy_reference
    _check_hand_over(transport, cold_greedy)
    assert _differ_in_their_first_block(cold_greedy)
    cluster.wait_idle()
    received = cluster.worker(decode.name).kv_bytes_received
    assert received == sum(response.placement.kv_bytes for response in cold_greedy)


def test_seeded_disaggregated_equals_aggregated(
    cluster: ProcessCluster,
    transport: str,
    seeded_reference: list[list[TokenBits]],
    cold_greedy: list[generation_pb2.GenerateResponse],
) -> None:
    sampling = common_pb2.SamplingOptions(temperature=SEEDED.temperature, top_p=SEEDED.top_p, seed=SEEDED.seed)
    responses = _generate_all(cluster, [PROMPTS[index] for index in WARM], sampling)
    assert [bits_of_received(response.results[0].logprobs) for response in responses] == seeded_reference
    before = [cold_greedy[index] for index in WARM]
    _check_hand_over(transport, responses, before=before)
    assert sum(answer.usage.completion_tokens > 1 for answer in before) > len(WARM) // 2
    cluster.wait_idle()


def test_a_cancelled_call_does_not_disturb_the_others(
    cluster: ProcessCluster, greedy_reference: list[list[TokenBits]]
) -> None:
    with cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            prompt=PROMPTS[-1],
            sampling=common_pb2.SamplingOptions(temperature=0.0),
            stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS),
            output=common_pb2.OutputOptions(logprobs=LOGPROBS),
        )
        victim = stub.GenerateStream(request)
        survivor = stub.Generate.future(request, timeout=120)
        next(iter(victim))
        victim.cancel()
        assert bits_of_received(survivor.result().results[0].logprobs) == greedy_reference[-1]
        with pytest.raises(grpc.RpcError):
            list(victim)
    cluster.wait_idle()
