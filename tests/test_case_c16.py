"""C16: logprobs = 5 gives one entry for each token, the first one included, also when decode has the whole prompt.

And prompt_logprobs gives one for each token of the prompt but the first, once for all choices, whatever is cached.
"""

from __future__ import annotations

import uuid

import pytest

from case_parts import BLOCK_BYTES, CasePair
from twinstage.engine.llm import LLM, GenerationLimits
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("cases")

PROMPT = tuple(3 + (11 * index) % 300 for index in range(48))  # three complete blocks
MAX_TOKENS = 12


def test_every_token_has_its_entry(case_pair: CasePair, quick_reference: LLM) -> None:
    limits = GenerationLimits(max_tokens=MAX_TOKENS, ignore_eos=True)
    (expected,) = quick_reference.generate([PROMPT], SamplingParameters(temperature=0.0), limits=limits, logprobs=5)
    request = generation_pb2.GenerateRequest(
        model=case_pair.transport,
        prompt_token_ids=common_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingOptions(temperature=0.0),
        stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS, ignore_eos=True),
        output=common_pb2.OutputOptions(logprobs=5, return_token_ids=True),
        cache_salt=uuid.uuid4().hex,  # at first nobody has any of it
    )
    with case_pair.cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for crossing in (3, 0):  # blocks: decode's cache is empty, then full
            response = stub.Generate(request, timeout=20)
            (result,) = response.results
            assert response.placement.kv_bytes == crossing * BLOCK_BYTES
            assert tuple(result.token_ids) == expected.token_ids
            assert len(result.logprobs) == MAX_TOKENS
            for entry, token in zip(result.logprobs, expected.tokens, strict=True):
                assert token.logprobs is not None
                assert entry.token_id == token.token_id
                assert entry.logprob == pytest.approx(token.logprobs.logprob, abs=1e-4)
                assert entry.rank == token.logprobs.rank == 1
                top = [(alternative.token_id, alternative.logprob) for alternative in token.logprobs.top]
                assert [alternative.token_id for alternative in entry.top] == [token_id for token_id, _ in top]
                assert [alternative.logprob for alternative in entry.top] == pytest.approx(
                    [logprob for _, logprob in top], abs=1e-4
                )
                assert len(top) == 5


def test_every_prompt_token_has_its_entry_although_the_caches_are_full(
    case_pair: CasePair, quick_reference: LLM
) -> None:
    limits = GenerationLimits(max_tokens=4, ignore_eos=True)
    sampling = SamplingParameters(temperature=0.8, seed=7)
    expected = quick_reference.generate([PROMPT], sampling, n=2, limits=limits, prompt_logprobs=2)
    request = generation_pb2.GenerateRequest(
        model=case_pair.transport,
        prompt_token_ids=common_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingOptions(temperature=0.8, seed=7, n=2),
        stopping=common_pb2.StoppingOptions(max_tokens=4, ignore_eos=True),
        output=common_pb2.OutputOptions(prompt_logprobs=2, return_token_ids=True),
        cache_salt=uuid.uuid4().hex,
    )
    with case_pair.cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for crossing in (3, 0):
            response = stub.Generate(request, timeout=20)
            assert response.placement.kv_bytes == crossing * BLOCK_BYTES
            assert [tuple(result.token_ids) for result in response.results] == [result.token_ids for result in expected]
            (scores,) = response.prompt_logprobs
            assert (scores.prompt_index, scores.start) == (0, 1)
            assert [entry.token_id for entry in scores.tokens] == list(PROMPT[1:])
            for entry, token in zip(scores.tokens, expected[0].prompt_logprobs, strict=True):
                assert token.logprobs is not None
                assert entry.logprob == pytest.approx(token.logprobs.logprob, abs=1e-4)
                assert [alternative.token_id for alternative in entry.top] == [
                    alternative.token_id for alternative in token.logprobs.top
                ]
