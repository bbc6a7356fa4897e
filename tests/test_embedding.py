"""Embeddings through the router, beside a generation model: the vectors are those of sentence-transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from harness import ProcessCluster
from twinstage.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("demo")]

# Sentences and what sentence-transformers makes of them, see tests/data/README.md.
REFERENCE = json.loads((Path(__file__).parent / "data" / "minilm_reference.json").read_text(encoding="utf-8"))
TEXTS: list[str] = [entry["text"] for entry in REFERENCE["sentences"]]
VECTORS = np.array([entry["embedding"] for entry in REFERENCE["sentences"]], dtype=np.float32)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def channel(demo_cluster: ProcessCluster) -> Iterator[grpc.Channel]:
    with demo_cluster.channel() as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> embedding_pb2_grpc.EmbeddingServiceStub:
    return embedding_pb2_grpc.EmbeddingServiceStub(channel)


def test_embed_equals_sentence_transformers(stub: embedding_pb2_grpc.EmbeddingServiceStub) -> None:
    response = stub.Embed(embedding_pb2.EmbedRequest(texts=TEXTS), timeout=60)
    assert [embedding.index for embedding in response.embeddings] == list(range(len(TEXTS)))
    vectors = np.array([embedding.values for embedding in response.embeddings])
    assert np.abs(vectors - VECTORS).max() <= TOLERANCE
    assert response.usage.prompt_tokens == sum(embedding.prompt_tokens for embedding in response.embeddings)
    assert response.placement.prefill_worker
    assert response.placement.decode_worker == ""


def test_encode_equals_embed(stub: embedding_pb2_grpc.EmbeddingServiceStub) -> None:
    inputs = [embedding_pb2.EncodeInput(text=text) for text in TEXTS]
    response = stub.Encode(embedding_pb2.EncodeRequest(inputs=inputs), timeout=60)
    assert np.abs(np.array([embedding.values for embedding in response.embeddings]) - VECTORS).max() <= TOLERANCE


def test_encode_stream_keeps_order_and_reports_each_item(stub: embedding_pb2_grpc.EmbeddingServiceStub) -> None:
    texts = [*TEXTS[:3], "", *TEXTS[3:]]
    requests = (embedding_pb2.EncodeStreamRequest(input=embedding_pb2.EncodeInput(text=text)) for text in texts)
    responses = list(stub.EncodeStream(requests, timeout=60))
    assert [response.index for response in responses] == list(range(len(texts)))
    assert responses[3].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    vectors = [list(response.embedding.values) for response in responses if response.HasField("embedding")]
    assert np.abs(np.array(vectors) - VECTORS).max() <= TOLERANCE


def test_formats_dimensions_and_normalization(stub: embedding_pb2_grpc.EmbeddingServiceStub) -> None:
    def embed(**options: object) -> embedding_pb2.Embedding:
        return stub.Embed(embedding_pb2.EmbedRequest(texts=TEXTS[:1], **options), timeout=60).embeddings[0]  # type: ignore[arg-type]

    packed = embed(format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT32)
    assert not packed.values
    assert np.abs(np.frombuffer(packed.packed, "<f4") - VECTORS[0]).max() <= TOLERANCE
    half = embed(format=embedding_pb2.EMBEDDING_FORMAT_PACKED_FLOAT16)
    assert np.abs(np.frombuffer(half.packed, "<f2").astype(np.float32) - VECTORS[0]).max() <= 1e-3
    short = embed(dimensions=64)
    assert short.dimensions == len(short.values) == 64
    assert np.linalg.norm(np.array(short.values)) == pytest.approx(1.0, abs=1e-5)
    assert struct.calcsize("<f") * 384 == len(packed.packed)


def test_a_text_that_is_too_long_is_refused_or_cut(stub: embedding_pb2_grpc.EmbeddingServiceStub) -> None:
    text = "word " * 2000
    with pytest.raises(grpc.RpcError) as caught:
        stub.Embed(embedding_pb2.EmbedRequest(texts=["fine", text]), timeout=60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "texts[1]" in caught.value.details()
    cut = embedding_pb2.Truncation(tokens=16)
    embedding = stub.Embed(embedding_pb2.EmbedRequest(texts=[text], truncation=cut), timeout=60).embeddings[0]
    assert embedding.prompt_tokens == 16


def test_generation_and_embedding_share_one_router(channel: grpc.Channel) -> None:
    generation = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(prompt="Hello", stopping=common_pb2.StoppingOptions(max_tokens=4))
    assert generation.Generate(request, timeout=60).usage.completion_tokens > 0
    with pytest.raises(grpc.RpcError) as caught:
        generation.Generate(generation_pb2.GenerateRequest(prompt="Hello", model="all-MiniLM-L6-v2"), timeout=60)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
