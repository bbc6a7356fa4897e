"""A client that goes away in any phase: the blocks return, and the next request is right.

Each phase is held open for as long as the test needs it: by a full decode pool (queued), by a long prompt in small
chunks (prefilling), by a slow proxy before the decode worker's KV port (transferring), by a long answer (decoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from harness import ProcessCluster, free_port, wait_until
from proxy import SlowProxy
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("cancel")

LONG_PROMPT = "the quick brown fox jumps over the lazy dog " * 20


@pytest.fixture(scope="module")
def proxy() -> Iterator[SlowProxy]:
    with SlowProxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def cluster(
    proxy: SlowProxy, prepared_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    """One prefill and one decode worker over tcp, through the proxy."""
    with ProcessCluster(tmp_path_factory.mktemp("cancel")) as cluster:
        model = str(prepared_tiny_model)
        # Equal prompts would share their blocks, and the pool is to be filled.
        common = ("--kv-transports", "tcp", "--kv-cache-bytes", "512KiB", "--no-prefix-cache", "--weights", "fp32")
        kv_address = f"127.0.0.1:{free_port()}"
        proxy.forward_to(kv_address)
        cluster.launch_worker("decode", model, *common, "--kv-listen", kv_address, "--kv-advertise", proxy.address)
        cluster.launch_worker("prefill", model, *common, "--max-tokens-per-step", "16")
        cluster.wait_ready(*cluster.processes)
        cluster.start_router()
        yield cluster


@pytest.fixture
def stub(cluster: ProcessCluster) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    with cluster.channel() as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def _request(prompt: str, *, max_tokens: int = 16, seed: int = 5) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.SamplingOptions(temperature=0.7, seed=seed),
        stopping=common_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(return_token_ids=True),
    )


@pytest.fixture
def expected(stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy) -> str:
    proxy.run_free()
    return str(stub.Generate(_request("what is right"), timeout=60).results[0].text)


def _check_next_is_right(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    proxy.run_free()
    cluster.wait_idle()
    assert stub.Generate(_request("what is right"), timeout=60).results[0].text == expected
    cluster.wait_idle()


def _await_cancelled(call: grpc.Future) -> None:
    call.cancel()
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result(10)


def test_cancel_while_prefilling(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    call = stub.Generate.future(_request(LONG_PROMPT, max_tokens=200), timeout=60)  # not over before it is seen
    prefill = next(role.name for role in cluster.processes if role.name.startswith("prefill"))
    wait_until(lambda: cluster.worker(prefill).running > 0 or call.done(), timeout_s=10, what="prefill runs")
    _await_cancelled(call)
    _check_next_is_right(cluster, stub, proxy, expected)


def test_cancel_while_transferring(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    proxy.hold()
    events = iter(stub.GenerateStream(_request(LONG_PROMPT), timeout=60))
    kinds = [next(events).WhichOneof("event"), next(events).WhichOneof("event")]
    assert kinds == ["prompt_info", "delta"], "the first token does not wait for the transfer"
    decode = next(role.name for role in cluster.processes if role.name.startswith("decode"))

    def has_blocks_set_aside() -> bool:
        worker = cluster.worker(decode)
        return worker.free_kv_blocks < worker.total_kv_blocks

    wait_until(has_blocks_set_aside, timeout_s=10, what="the router hears of the reservation")
    assert cluster.worker(decode).running == 0, "decode cannot run before the hand-over is complete"
    events.cancel()  # type: ignore[attr-defined]
    _check_next_is_right(cluster, stub, proxy, expected)


def test_cancel_while_queued(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    proxy.hold()
    decode = next(role.name for role in cluster.processes if role.name.startswith("decode"))
    blockers = []
    while (free := cluster.worker(decode).free_kv_blocks) >= cluster.worker(decode).total_kv_blocks // 4:
        blockers.append(stub.Generate.future(_request(LONG_PROMPT, seed=len(blockers)), timeout=60))
        wait_until(
            lambda free=free: cluster.worker(decode).free_kv_blocks < free,  # type: ignore[misc]
            timeout_s=10,
            what="another reservation",
        )
        assert len(blockers) < 64
    queued = [stub.Generate.future(_request(LONG_PROMPT, seed=100 + index), timeout=60) for index in range(8)]
    wait_until(lambda: cluster.worker(decode).waiting > 0, timeout_s=10, what="a reservation waits")
    for call in [*queued, *blockers]:
        _await_cancelled(call)
    _check_next_is_right(cluster, stub, proxy, expected)


def test_cancel_while_decoding(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    events = iter(stub.GenerateStream(_request("a long answer", max_tokens=200), timeout=60))
    tokens = 0
    while tokens < 5:
        tokens += len(next(events).delta.token_ids)
    events.cancel()  # type: ignore[attr-defined]
    _check_next_is_right(cluster, stub, proxy, expected)


def test_cancel_at_random_moments(
    cluster: ProcessCluster, stub: generation_pb2_grpc.GenerationServiceStub, proxy: SlowProxy, expected: str
) -> None:
    """Forty calls, each with a deadline a little later than the last: every phase is cut somewhere."""
    calls = [
        stub.Generate.future(_request(LONG_PROMPT, max_tokens=40, seed=index), timeout=0.01 + 0.02 * index)
        for index in range(40)
    ]
    codes = set()
    for call in calls:
        error = call.exception(30)
        codes.add(error.code() if error is not None else grpc.StatusCode.OK)
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
    _check_next_is_right(cluster, stub, proxy, expected)
