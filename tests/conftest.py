"""Models and clusters that several test modules share, and time for whoever compiles kernels.

A session's fixtures live once in each xdist process; modules that share a cluster carry the same xdist_group, so that
the cluster is started once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from case_parts import FLAGS as CASE_FLAGS
from case_parts import CasePair
from fused_models import tiny_config
from harness import ProcessCluster
from tiny_models import make_tiny_llama, make_tiny_model
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.models.fused.load import load_fused
from twinstage.models.resolve import resolve_model

COMPILING_FIXTURES = ("prepared_tiny_model", "quick_model")
COMPILE_TIMEOUT_S = 600.0  # kernels take 10 to 15 s of a processor, which a busy machine may give in minutes

# A suite that draws other examples each time fails for whoever comes by; `make fuzz` is there to draw new ones.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # test processes and what they start share the cores, where waiting threads spin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever is the first to need compiled kernels gets the time to make them."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        compiles = item.path.name.startswith("test_fused") or not fixtures.isdisjoint(COMPILING_FIXTURES)
        if compiles and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(COMPILE_TIMEOUT_S))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama, complete with tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_tiny_llama(directory)
    return directory


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama for own kernels (`--weights fp32`): workers start in a second, and batches change no bit."""
    config = tiny_config("llama", hidden_size=96, intermediate_size=160)
    return make_tiny_model(tmp_path_factory.mktemp("models") / "quick-llama", config, weight_scale=3.0)


@pytest.fixture(scope="session")
def quick_reference(quick_model: Path) -> Iterator[LLM]:
    """The engine in one process on the same model."""
    options = LlmOptions(weights="fp32", kv_cache_bytes=8_000_000, threads=1)
    with LLM(str(quick_model), options) as llm:
        yield llm


@pytest.fixture(scope="session")
def prepared_tiny_model(tiny_model: Path) -> Path:
    """The same, with packed weights and kernels in the cache: workers with `--weights fp32` start without torch."""
    load_fused(resolve_model(str(tiny_model)), precision="fp32", threads=1).close()
    return tiny_model


@pytest.fixture(scope="session")
def tiny_cluster(prepared_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Router, two prefill and three decode workers on the tiny model."""
    with ProcessCluster(tmp_path_factory.mktemp("tiny-cluster")) as cluster:
        flags = ("--kv-cache-bytes", "8MiB", "--weights", "fp32")
        cluster.start_workers(str(prepared_tiny_model), prefill=2, decode=3, flags=flags)
        cluster.start_router()
        yield cluster


@pytest.fixture(scope="session")
def demo_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """Router, one prefill and one decode worker on the demo model, over shared memory, and an embedding worker."""
    with ProcessCluster(tmp_path_factory.mktemp("demo-cluster")) as cluster:
        embedding = cluster.launch_worker("prefill", "demo-embedding")
        cluster.start_workers("demo", flags=("--kv-cache-bytes", "512MiB"))
        cluster.wait_ready(embedding)
        cluster.start_router()
        yield cluster


@pytest.fixture(scope="session")
def case_cluster(quick_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    """A router and two pairs of workers: one that hands over by shm, one by tcp."""
    with ProcessCluster(tmp_path_factory.mktemp("cases")) as cluster:
        for transport in ("shm", "tcp"):
            flags = ("--kv-transports", transport, "--served-model-name", transport, *CASE_FLAGS)
            for role in ("prefill", "decode"):
                cluster.launch_worker(role, str(quick_model), *flags, name=f"{role}-{transport}")
        cluster.wait_ready(*cluster.processes)
        cluster.start_router()
        yield cluster


@pytest.fixture(params=["shm", "tcp"])
def case_pair(request: pytest.FixtureRequest, case_cluster: ProcessCluster) -> Iterator[CasePair]:
    """The pair of each transport; all blocks of all workers are free before and after."""
    prefill, decode = (
        next(process for process in case_cluster.processes if process.name == f"{role}-{request.param}")
        for role in ("prefill", "decode")
    )
    case_cluster.wait_idle()
    yield CasePair(transport=request.param, prefill=prefill, decode=decode, cluster=case_cluster)
    case_cluster.wait_idle()
    assert not any(worker.leaked_kv_blocks for worker in case_cluster.workers())
