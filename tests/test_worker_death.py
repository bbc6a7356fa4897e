"""kill -9 of a prefill worker while it computes: the request completes elsewhere, or fails quickly and clearly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from case_cluster import TESTS, prompt_of
from faulty_worker import MARK, Wrong
from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.v1 import admin_pb2, common_pb2, generation_pb2, generation_pb2_grpc

SLOW_PROMPT = prompt_of(160, marks=(MARK, Wrong.SLOW_PREFILL))
# Small chunks, computed anew each time: with the slow prompt's pauses there are two seconds for an interruption.
SMALL_CHUNKS = ("--max-tokens-per-step", "4", "--no-prefix-cache")
# The time from the kill to the status is bounded by 2 s; starting the call and reading the table come on top.
UNAVAILABLE_WITHIN_S = 2.0


def _request(prompt: tuple[int, ...] = SLOW_PROMPT, seed: int = 3) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingOptions(temperature=0.9, seed=seed),
        stopping=common_pb2.StoppingOptions(max_tokens=24, ignore_eos=True),
    )


def _cluster(directory: Path) -> ProcessCluster:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return ProcessCluster(directory, environment={"PYTHONPATH": path})


def _start(cluster: ProcessCluster, model: Path, *, prefill: int) -> None:
    common = ("--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1", "--weights", "fp32")
    workers = [
        cluster.launch("faulty_worker", name, "prefill", "--worker-id", name, *common, *SMALL_CHUNKS)
        for name in (f"prefill-{number}" for number in range(prefill))
    ]
    workers.append(cluster.launch_worker("decode", str(model), "--weights", "fp32"))
    cluster.wait_ready(*workers)
    cluster.start_router()


def _busy_prefill(cluster: ProcessCluster) -> RoleProcess:
    """The prefill worker that computes the only request."""
    busy: list[str] = []

    def find() -> bool:
        busy[:] = [w.id for w in cluster.workers() if w.role == admin_pb2.WORKER_ROLE_PREFILL and w.running]
        return bool(busy)

    wait_until(find, timeout_s=15, what="a prefill worker computes")
    return next(role for role in cluster.processes if role.name == busy[0])


def test_the_request_completes_on_another_prefill_worker(prepared_tiny_model: Path, tmp_path: Path) -> None:
    with _cluster(tmp_path) as cluster:
        _start(cluster, prepared_tiny_model, prefill=2)
        decode_pid = next(role.pid for role in cluster.processes if role.name.startswith("decode"))
        with cluster.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            undisturbed = stub.Generate(_request(), timeout=60)
            call = stub.Generate.future(_request(), timeout=60)
            victim = _busy_prefill(cluster)
            victim.kill()
            response = call.result(60)
            assert response.results[0].text == undisturbed.results[0].text
            assert response.placement.retries == 1
            assert response.placement.prefill_worker != victim.name
            for seed in range(10):
                made = _request(prompt_of(100, salt=seed), seed)
                assert stub.Generate(made, timeout=60).usage.completion_tokens == 24
        assert next(role.pid for role in cluster.processes if role.name.startswith("decode")) == decode_pid
        cluster.wait_idle()


def test_without_another_prefill_worker_the_call_fails_within_two_seconds(
    prepared_tiny_model: Path, tmp_path: Path
) -> None:
    with _cluster(tmp_path) as cluster:
        _start(cluster, prepared_tiny_model, prefill=1)
        with cluster.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate.future(_request(), timeout=60)
            victim = _busy_prefill(cluster)
            victim.kill()
            killed_s = time.monotonic()
            error = call.exception(30)
            assert time.monotonic() - killed_s < UNAVAILABLE_WITHIN_S
        assert isinstance(error, grpc.RpcError)
        assert error.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        status = rpc_status.from_call(error)
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        wait_until(
            lambda: all(
                worker.free_kv_blocks == worker.total_kv_blocks
                for worker in cluster.workers()
                if worker.role == admin_pb2.WORKER_ROLE_DECODE
            ),
            timeout_s=5,
            what="decode's blocks free",
        )
