"""Bad input: the status and details of the error table; the server lives; nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from harness import ProcessCluster
from twinstage.v1 import (
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

pytestmark = pytest.mark.xdist_group("tiny")


@pytest.fixture(scope="module")
def channel(tiny_cluster: ProcessCluster) -> Iterator[grpc.Channel]:
    with tiny_cluster.channel() as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel, tiny_cluster: ProcessCluster) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    """A stub; after the test nothing is allocated and the next request is served."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    yield stub
    tiny_cluster.wait_idle()
    assert stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=30).usage.completion_tokens > 0


def _fails(call: object, request: object) -> tuple[grpc.StatusCode, str, list[object]]:
    """The code, message and unpacked details of a call that has to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=30)  # type: ignore[operator]
    status = rpc_status.from_call(caught.value)
    details: list[object] = []
    for detail in status.details if status else []:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.ResourceInfo):
            message = kind()
            if detail.Unpack(message):
                details.append(message)
    return caught.value.code(), caught.value.details(), details


def _fields(details: list[object]) -> set[str]:
    return {
        violation.field
        for detail in details
        if isinstance(detail, error_details_pb2.BadRequest)
        for violation in detail.field_violations
    }


def _model(channel: grpc.Channel) -> model_pb2.Model:
    return model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=10).model


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": common_pb2.TokenIds()}, "prompt_token_ids.ids"),
    ],
)
def test_empty_input(
    stub: generation_pb2_grpc.GenerationServiceStub, request_fields: dict[str, object], field: str
) -> None:
    code, _, details = _fails(stub.Generate, generation_pb2.GenerateRequest(**request_fields))  # type: ignore[arg-type]
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert _fields(details) == {field}


@pytest.mark.parametrize("streamed", [False, True])
def test_every_violation_is_reported_at_once(
    stub: generation_pb2_grpc.GenerationServiceStub, channel: grpc.Channel, streamed: bool
) -> None:
    request = generation_pb2.GenerateRequest(
        prompt="Hello",
        sampling=common_pb2.SamplingOptions(
            temperature=math.nan,
            top_p=0.0,
            top_k=0,
            min_p=1.5,
            repetition_penalty=0.0,
            presence_penalty=-3,
            frequency_penalty=math.inf,
            logit_bias={10**6: 1.0},
        ),
        stopping=common_pb2.StoppingOptions(max_tokens=0, stop=["ok", ""], stop_token_ids=[10**6]),
        output=common_pb2.OutputOptions(logprobs=21),
    )
    call = (lambda request, timeout: list(stub.GenerateStream(request, timeout=timeout))) if streamed else stub.Generate
    code, _, details = _fails(call, request)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert _fields(details) == {
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.min_p",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        f"sampling.logit_bias[{10**6}]",
        "stopping.max_tokens",
        "stopping.stop[1]",
        "stopping.stop_token_ids[0]",
        "output.logprobs",
    }


def test_prompt_at_the_limit(stub: generation_pb2_grpc.GenerationServiceStub, channel: grpc.Channel) -> None:
    limit = _model(channel).max_model_len

    def request(tokens: int, **stopping: int) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=[5] * tokens), stopping=common_pb2.StoppingOptions(**stopping)
        )

    fits = stub.Generate(request(limit - 1, max_tokens=1), timeout=60)
    assert fits.usage.prompt_tokens == limit - 1
    assert fits.results[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert fits.placement.transport == "", "one token needs no decode worker"
    for tokens in (limit, limit + 1):
        code, message, details = _fails(stub.Generate, request(tokens))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert str(tokens) in message
        assert str(limit) in message
        assert _fields(details) == {"prompt_token_ids.ids"}
    code, message, _ = _fails(stub.Generate, request(limit - 1, max_tokens=2))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert str(limit) in message


def test_unknown_model(stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    code, message, details = _fails(stub.Generate, generation_pb2.GenerateRequest(prompt="Hello", model="nobody"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert "nobody" in message
    resources = [detail for detail in details if isinstance(detail, error_details_pb2.ResourceInfo)]
    assert [resource.resource_name for resource in resources] == ["nobody"]


def test_unknown_token_id(stub: generation_pb2_grpc.GenerationServiceStub, channel: grpc.Channel) -> None:
    vocab_size = _model(channel).vocab_size
    request = generation_pb2.GenerateRequest(prompt_token_ids=common_pb2.TokenIds(ids=[1, 2, vocab_size]))
    code, _, details = _fails(stub.Generate, request)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert _fields(details) == {"prompt_token_ids.ids[2]"}


def test_text_model_refuses_to_embed(channel: grpc.Channel, tiny_cluster: ProcessCluster) -> None:
    embed = embedding_pb2_grpc.EmbeddingServiceStub(channel).Embed
    model = _model(channel).name
    code, _, details = _fails(embed, embedding_pb2.EmbedRequest(texts=["Hello"], model=model))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    reasons = [detail.reason for detail in details if isinstance(detail, error_details_pb2.ErrorInfo)]
    assert reasons == ["TASK_NOT_SUPPORTED"]


def test_continue_final_message_excludes_generation_prompt(channel: grpc.Channel) -> None:
    request = tokenizer_pb2.RenderChatRequest(
        messages=[generation_pb2.ChatMessage(role="user", content="Hello")],
        add_generation_prompt=True,
        continue_final_message=True,
    )
    code, _, details = _fails(tokenizer_pb2_grpc.TokenizerServiceStub(channel).RenderChat, request)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert _fields(details) == {"add_generation_prompt"}


def test_a_failed_call_sends_no_initial_metadata(stub: generation_pb2_grpc.GenerationServiceStub) -> None:
    """Headers would commit the call and end the client's transparent retry (they come alone with the trailers)."""
    call = stub.GenerateStream(generation_pb2.GenerateRequest(prompt="Hello", model="nobody"), timeout=30)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert not [key for key, _ in call.initial_metadata() if key not in {"content-type"}]
