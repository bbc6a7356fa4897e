"""Several models behind one router, in real processes: each has workers of its own, and another may join later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import BertConfig, BertModel

from harness import ProcessCluster, free_port, wait_until
from test_embedding_model import _write_folder
from tiny_models import VOCABULARY_SIZE
from twinstage.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    scoring_pb2,
    scoring_pb2_grpc,
)

pytestmark = pytest.mark.xdist_group("tiny")  # whose kernels are compiled there


def write_embedder(directory: Path, *, seed: int, dimensions: int) -> Path:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY_SIZE, "intermediate_size": 64, "num_hidden_layers": 1}
    model = BertModel(BertConfig(**sizes, hidden_size=dimensions, num_attention_heads=4, max_position_embeddings=64))
    return _write_folder(directory, model)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


def test_a_model_joins_a_running_router_and_leaves_it(prepared_tiny_model: Path, tmp_path: Path) -> None:
    first = write_embedder(tmp_path / "first", seed=1, dimensions=32)
    second = write_embedder(tmp_path / "second", seed=2, dimensions=48)
    port = free_port()
    with ProcessCluster(tmp_path) as cluster:
        embedder = cluster.launch_worker("prefill", str(first), "--served-model-name", "first", name="first-0")
        flags = ("--served-model-name", "writer", "--kv-cache-bytes", "8MiB", "--weights", "fp32")
        cluster.start_workers(str(prepared_tiny_model), flags=flags)
        cluster.wait_ready(embedder)
        cluster.start_router("--workers", f"127.0.0.1:{port}")
        with cluster.channel() as channel:
            embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)

            def serves(service: str, model: str) -> bool:
                request = health_pb2.HealthCheckRequest(service=f"twinstage.v1.{service}/{model}")
                response = health.Check(request, timeout=10)
                return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

            def embed(model: str = "") -> embedding_pb2.EmbedResponse:
                request = embedding_pb2.EmbedRequest(texts=["hello world"], model=model)
                return embedding.Embed(request, timeout=30)

            alone = embed()
            assert (alone.model, alone.embeddings[0].dimensions) == ("first", 32)
            code, words = refusal(lambda: embed("writer"))
            assert (code, "cannot embed" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
            assert (
                refusal(lambda: embed("second"))[0] is grpc.StatusCode.UNAVAILABLE
            )  # who is not there yet may serve it
            assert (serves("EmbeddingService", "first"), serves("EmbeddingService", "writer")) == (True, False)

            own_flags = ("--model", str(second), "--served-model-name", "second", "--worker-id", "second-0")
            joined = cluster.launch("prefill_worker", "second-0", *own_flags, "--listen", f"127.0.0.1:{port}")
            cluster.wait_ready(joined)
            listing = model_pb2_grpc.ModelServiceStub(channel)
            wait_until(
                lambda: len(listing.ListModels(model_pb2.ListModelsRequest(), timeout=10).models) == 3,
                timeout_s=30,
                what="the new model",
            )
            models = {
                model.name: model for model in listing.ListModels(model_pb2.ListModelsRequest(), timeout=10).models
            }
            assert model_pb2.MODEL_CAPABILITY_GENERATE in models["writer"].capabilities
            for name in ("first", "second"):
                assert list(models[name].capabilities) == [
                    model_pb2.MODEL_CAPABILITY_EMBED,
                    model_pb2.MODEL_CAPABILITY_SCORE,
                ]
                assert serves("EmbeddingService", name)
                assert serves("ScoringService", name)
            code, words = refusal(embed)
            assert (code, "first, second" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            answers = {name: embed(name) for name in ("first", "second")}
            assert [answer.placement.prefill_worker for answer in answers.values()] == ["first-0", "second-0"]
            assert answers["second"].embeddings[0].dimensions == 48
            assert list(answers["first"].embeddings[0].values) == pytest.approx(list(alone.embeddings[0].values))
            scored = scoring_pb2_grpc.ScoringServiceStub(channel).Score(
                scoring_pb2.ScoreRequest(queries=["hello world"], documents=["hello world", "one"], model="second"),
                timeout=30,
            )
            assert scored.scores[0].score == pytest.approx(1.0, abs=1e-6)
            assert scored.scores[0].score > scored.scores[1].score
            text = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                generation_pb2.GenerateRequest(prompt="hello", stopping={"max_tokens": 2}),
                timeout=30,
            )
            assert text.model == "writer", "the only one that generates"

            joined.kill()
            wait_until(lambda: not serves("EmbeddingService", "second"), timeout_s=15, what="the model's end")
            assert serves("EmbeddingService", "first")
            assert refusal(lambda: embed("second"))[0] is grpc.StatusCode.UNAVAILABLE
            assert embed("first").embeddings[0].dimensions == 32
