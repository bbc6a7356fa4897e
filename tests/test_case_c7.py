"""C7: prompts of the limit less one, of the limit, and one more: the last two are refused, and decode does nothing."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from case_parts import MAX_MODEL_LEN, CasePair
from twinstage.v1 import admin_pb2, common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("cases")


def request_of(model: str, length: int, **stopping: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        model=model,
        prompt_token_ids=common_pb2.TokenIds(ids=[3 + index % 300 for index in range(length)]),
        sampling=common_pb2.SamplingOptions(temperature=0.0),
        stopping=common_pb2.StoppingOptions(ignore_eos=True, **stopping),
    )


def done(pair: CasePair) -> list[tuple[int, int, int]]:
    """What each worker of the pair has done so far."""
    workers: list[admin_pb2.Worker] = [pair.cluster.worker(role.name) for role in (pair.prefill, pair.decode)]
    return [(worker.finished, worker.kv_bytes_received, worker.prefix_looked_up_blocks) for worker in workers]


def refusal(stub: generation_pb2_grpc.GenerationServiceStub, request: generation_pb2.GenerateRequest) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status.details)
    return " ".join(f"{entry.field} {entry.description}" for entry in bad_request.field_violations)


def test_the_last_token_that_fits_needs_no_decode_worker(case_pair: CasePair) -> None:
    with case_pair.cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        (_, before) = done(case_pair)
        for stopping in ({}, {"max_tokens": 1}):
            answer = stub.Generate(request_of(case_pair.transport, MAX_MODEL_LEN - 1, **stopping), timeout=20)
            assert answer.usage.completion_tokens == 1
            assert answer.placement.decode_worker == ""
        assert done(case_pair)[1] == before


def test_what_does_not_fit_is_refused_before_anything_is_allocated(case_pair: CasePair) -> None:
    with case_pair.cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        before = done(case_pair)
        for length, stopping in (
            (MAX_MODEL_LEN, {}),
            (MAX_MODEL_LEN, {"max_tokens": 1}),
            (MAX_MODEL_LEN + 1, {}),
            (MAX_MODEL_LEN - 1, {"max_tokens": 2}),
            (MAX_MODEL_LEN - 2, {"max_tokens": 3, "min_tokens": 3}),
        ):
            words = refusal(stub, request_of(case_pair.transport, length, **stopping))
            assert str(length) in words, (length, stopping)
            assert str(MAX_MODEL_LEN) in words, (length, stopping)
        assert done(case_pair) == before
