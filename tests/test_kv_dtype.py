"""Keys and values in 16 bits: half the bytes through the hand-over, and what the engine in one process answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from harness import ProcessCluster
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.kv.memory import BlockMemory
from twinstage.kv.store import KvStore
from twinstage.models.adapt import PagedModel
from twinstage.models.batch import PagedChunk, make_batch
from twinstage.models.choose import load_chosen
from twinstage.models.fused.target import target
from twinstage.models.load import load_model
from twinstage.models.resolve import resolve_model
from twinstage.types import SamplingParameters
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("fused")  # shares compiled kernels

PROMPT = "A router accepts requests, a worker reads the prompt, another worker writes the answer. " * 3
MAX_TOKENS = 24
TOKEN_IDS = range(3, 33)


def _logits(model: PagedModel, *ends: int) -> torch.Tensor:
    """After the last of some tokens, computed in chunks that end at `ends`."""
    layout = model.kv_layout(4)
    memory = BlockMemory.create(num_blocks=8, block_bytes=layout.block_bytes)
    store, start, result = KvStore(layout, memory), 0, torch.empty(0)
    for end in (*ends, len(TOKEN_IDS)):
        chunk = PagedChunk(token_ids=TOKEN_IDS[start:end], start=start, block_ids=range(8), num_logits=1)
        result, start = model.forward(make_batch([chunk], block_size=4), store), end
    return result


@pytest.mark.parametrize(("kv_dtype", "limit"), [("float16", 0.01), ("bfloat16", 0.1)])
def test_stock_modules_on_kv_in_16_bits(tiny_model: Path, kv_dtype: str, limit: float) -> None:
    resolved = resolve_model(str(tiny_model))
    model = load_model(resolved, kv_dtype=kv_dtype)
    assert model.kv_layout(4).dtype == kv_dtype
    whole, exact = _logits(model), _logits(load_model(resolved))
    assert 1e-6 < (whole - exact).abs().max() / exact.abs().max() < limit
    # A token sees the rounded keys and values of all others, also of those in its own chunk.
    for ends in ((11,), (1, 2, 29)):
        torch.testing.assert_close(_logits(model, *ends), whole, rtol=0, atol=float(1e-4 * exact.abs().max()))


@pytest.mark.timeout(600)  # compiles
def test_auto_follows_the_weights(tiny_model: Path) -> None:
    fast = "bfloat16" if target().bfloat16_dot else "float16"
    resolved = resolve_model(str(tiny_model))
    assert load_chosen(resolved, weights="stock").kv_layout(16).dtype == "float32"
    assert load_chosen(resolved, weights="int8", threads=1).kv_layout(16).dtype == fast
    exact = load_chosen(resolved, weights="auto", threads=1)
    assert exact.rows_are_independent  # own kernels
    assert exact.kv_layout(16).dtype == "float32"


@pytest.mark.timeout(600)  # compiles
@pytest.mark.parametrize(("weights", "kv_dtype"), [("stock", "float16"), ("int8", "auto")])
def test_disaggregated_equals_aggregated(weights: str, kv_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_model), LlmOptions(weights=weights, kv_dtype=kv_dtype, threads=1))
    expected = llm.generate([PROMPT], SamplingParameters(temperature=0.0), max_tokens=MAX_TOKENS)[0]
    llm.close()
    with ProcessCluster(tmp_path) as cluster:
        flags = ("--weights", weights, "--kv-dtype", kv_dtype, "--threads", "1", "--kv-cache-bytes", "8MiB")
        cluster.start_workers(str(tiny_model), flags=flags)
        cluster.start_router()
        with cluster.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = generation_pb2.GenerateRequest(
                prompt=PROMPT,
                sampling=common_pb2.SamplingOptions(temperature=0.0),
                stopping=common_pb2.StoppingOptions(max_tokens=MAX_TOKENS),
                output=common_pb2.OutputOptions(return_token_ids=True),
            )
            response = stub.Generate(request, timeout=60)
    assert tuple(response.results[0].token_ids) == expected.token_ids
    assert len(expected.token_ids) > 1
    blocks = math.ceil(response.usage.prompt_tokens / 16)
    token_bytes = 2 * 2 * 2 * 16 * 2  # layers, key and value, heads, dimensions, bytes
    assert response.placement.kv_bytes == blocks * 16 * token_bytes
