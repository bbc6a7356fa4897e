"""ModelService tells of a model exactly what requests to it may ask for."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from router.admission.capabilities import Capability
from served_router import Service, serving
from twinstage.v1 import embedding_pb2, generation_pb2, model_pb2, model_pb2_grpc, scoring_pb2, scoring_pb2_grpc

SHORT = {"stopping": {"max_tokens": 2}}
HELLO = {"prompt": "Hello", **SHORT}
# A request that asks for what a capability names, and for nothing else that not every model has.
ASKING: dict[Capability, tuple[str, dict[str, Any]]] = {
    Capability.GENERATE: ("Generate", HELLO),
    Capability.CHAT: ("Chat", {"messages": [{"role": "user", "content": "Hi"}], **SHORT}),
    Capability.CHOICES: ("Generate", {**HELLO, "sampling": {"n": 2}}),
    Capability.BATCH: ("Generate", {"batch": {"prompts": [{"prompt": "a"}, {"prompt": "b"}]}, **SHORT}),
    Capability.LOGPROBS: ("Generate", {**HELLO, "output": {"logprobs": 1}}),
    Capability.PROMPT_LOGPROBS: ("Generate", {**HELLO, "output": {"prompt_logprobs": 1}}),
    Capability.REPETITION_DETECTION: (
        "Generate",
        {"prompt": "Hello", "stopping": {"max_tokens": 2, "repetition_detection": {"min_count": 3}}},
    ),
    Capability.STRUCTURED_OUTPUT: ("Generate", {**HELLO, "structured_output": {"regex": "[a-z]+"}}),
    Capability.TOOLS: (
        "Chat",
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"name": "f"}], **SHORT},
    ),
    Capability.EMBED: ("Embed", {"texts": ["a"]}),
    Capability.SCORE: ("Score", {"queries": ["a"], "documents": ["b"]}),
}
REFUSALS = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION}


async def is_accepted(service: Service, model: str, method: str, fields: dict[str, Any]) -> bool:
    kind, stub = {
        "Generate": (generation_pb2.GenerateRequest, service.generation),
        "Chat": (generation_pb2.ChatRequest, service.generation),
        "Embed": (embedding_pb2.EmbedRequest, service.embedding),
        "Score": (scoring_pb2.ScoreRequest, scoring_pb2_grpc.ScoringServiceStub(service.channel)),
    }[method]
    request = json_format.ParseDict({"model": model, **fields}, kind())
    try:
        await getattr(stub, method)(request, timeout=10)
    except grpc.aio.AioRpcError as error:
        no_parser = "tools" in fields and "shows no way of calling tools" in (error.details() or "")
        if error.code() not in REFUSALS and not no_parser:
            raise
        return False
    return True


@pytest.mark.parametrize("model", ["fake", "embedder"])
async def test_capabilities_are_what_requests_may_ask_for(model: str) -> None:
    async with serving() as service:
        stub: Any = model_pb2_grpc.ModelServiceStub(service.channel)
        told = (await stub.GetModel(model_pb2.GetModelRequest(name=model), timeout=10)).model.capabilities
        accepted = {
            model_pb2.ModelCapability.Value(f"MODEL_CAPABILITY_{capability.value.upper()}")
            for capability, (method, fields) in ASKING.items()
            if await is_accepted(service, model, method, fields)
        }
    tried = {model_pb2.ModelCapability.Value(f"MODEL_CAPABILITY_{capability.value.upper()}") for capability in ASKING}
    assert set(told) & tried == accepted
    assert list(told) == sorted(told)


def test_every_capability_has_its_enumeration() -> None:
    public = {name.removeprefix("MODEL_CAPABILITY_").lower() for name in list(model_pb2.ModelCapability.keys())}
    assert public - {"unspecified"} == {capability.value for capability in Capability}
