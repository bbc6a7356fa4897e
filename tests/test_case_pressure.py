"""Cases C1, C2, C11 and C12: few KV blocks, a slow channel and clients that give up, over both transports.

One cluster in deterministic mode, so that answers can be compared bit by bit with those of a single process; its decode
worker has nine blocks. It has a prefill worker for each transport, of which the other one is drained. The channel is
slow because its sender is: signals let it run for a few milliseconds of every hundred.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness import ProcessCluster, RoleProcess, wait_until
from token_bits import TokenBits, bits_of_produced, bits_of_received
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.types import SamplingParameters
from twinstage.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("case_pressure")

CHUNK = 16  # tokens, also those of a block
BLOCK_BYTES = 8192  # 512 bytes of keys and values a token
POOL_BLOCKS = 9
SEED = 11
RUNS_S, PERIOD_S = 0.003, 0.1
FREE_WITHIN_S = 15.0
MANY = 8


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("pressure")) as cluster:
        common = ("--deterministic", "--no-prefix-cache", "--max-tokens-per-step", str(CHUNK))
        pool = ("--kv-cache-bytes", str(POOL_BLOCKS * BLOCK_BYTES))
        cluster.launch_worker("decode", str(tiny_model), *common, *pool, name="decode")
        for transport in ("shm", "tcp"):
            cluster.launch_worker("prefill", str(tiny_model), *common, "--kv-transports", transport, name=transport)
        cluster.wait_ready(*cluster.processes)
        cluster.start_router()
        yield cluster


class Service:
    """The service as its clients see it, with one transport in use."""

    def __init__(self, cluster: ProcessCluster, channel: grpc.Channel, *, transport: str) -> None:
        self.cluster = cluster
        self.prefill: RoleProcess = next(role for role in cluster.processes if role.name == transport)
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.transport = transport

    @property
    def decode(self) -> admin_pb2.Worker:
        return self.cluster.worker("decode")

    def bits(self, request: generation_pb2.GenerateRequest) -> list[TokenBits]:
        return bits_of_response(self.generation.Generate(request, timeout=60), transport=self.transport)

    def wait_idle(self) -> None:
        """Every block of every worker is free again, and none is held in nobody's name."""

        def is_idle() -> bool:
            return all(
                worker.free_kv_blocks == worker.total_kv_blocks
                and not (worker.running or worker.waiting or worker.unfinished or worker.leaked_kv_blocks)
                for worker in self.cluster.workers()
            )

        wait_until(is_idle, timeout_s=FREE_WITHIN_S, what="all blocks free")

    @contextlib.contextmanager
    def slow_sender(self) -> Iterator[None]:
        """Let the prefill worker run for a few milliseconds of every hundred."""
        ended = threading.Event()

        def stutter() -> None:
            while not ended.wait(RUNS_S):
                self.prefill.send(signal.SIGSTOP)
                ended.wait(PERIOD_S - RUNS_S)
                self.prefill.send(signal.SIGCONT)

        thread = threading.Thread(target=stutter)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.prefill.send(signal.SIGCONT)


@pytest.fixture(params=["shm", "tcp"])
def service(cluster: ProcessCluster, request: pytest.FixtureRequest) -> Iterator[Service]:
    """Every test ends with all blocks free."""
    other = {"shm": "tcp", "tcp": "shm"}[request.param]
    with cluster.channel() as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=other), timeout=10)
        service = Service(cluster, channel, transport=request.param)
        yield service
        service.wait_idle()
        admin.UndrainWorker(admin_pb2.UndrainWorkerRequest(worker_id=other), timeout=10)


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(29 * index + 7 * length + 31 * number) % 380 + 3 for index in range(length)]


def request_of(length: int, *, max_tokens: int, number: int = 0) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=prompt_of(length, number)),
        sampling=common_pb2.SamplingOptions(temperature=0.9, seed=SEED),
        stopping=common_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(logprobs=2),
    )


def bits_of_response(response: generation_pb2.GenerateResponse, *, transport: str) -> list[TokenBits]:
    assert response.placement.transport == transport
    return bits_of_received(response.results[0].logprobs)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Iterator[LLM]:
    options = LlmOptions(deterministic=True, threads=1, kv_cache_bytes=4 * 1024 * 1024, max_tokens_per_step=CHUNK)
    with LLM(str(tiny_model), options) as llm:
        yield llm


def expected(llm: LLM, length: int, *, max_tokens: int, numbers: range = range(1)) -> list[list[TokenBits]]:
    """What a single process answers to `request_of`."""
    results = llm.generate(
        [prompt_of(length, number) for number in numbers],
        SamplingParameters(temperature=0.9, seed=SEED),
        limits=GenerationLimits(max_tokens=max_tokens, ignore_eos=True),
        logprobs=2,
    )
    return [bits_of_produced(result.tokens) for result in results]


# --- the cases ------------------------------------------------------------------------------------


def test_c1_an_abort_during_a_transfer_leaves_the_next_owner_of_the_blocks_alone(
    service: Service, reference: LLM
) -> None:
    """A and B have six blocks each of nine. A is cancelled while its blocks are on their way, and B comes at once."""
    six_blocks = 6 * CHUNK
    wanted = expected(reference, six_blocks - 1, max_tokens=16, numbers=range(1, 2))[0]
    cut_short = 0
    for delay_s in (0.05, 0.1, 0.15, 0.2):
        with ThreadPoolExecutor(1) as threads:
            with service.slow_sender():
                events_a = service.generation.GenerateStream(request_of(six_blocks - 1, max_tokens=16), timeout=60)
                wait_until(lambda: service.decode.free_kv_blocks == POOL_BLOCKS - 6, timeout_s=20, what="a grant")
                waiting_b = threads.submit(service.bits, request_of(six_blocks - 1, max_tokens=16, number=1))
                time.sleep(delay_s)
                cut_short += service.decode.running == 0  # the hand-over is not complete
                events_a.cancel()
                time.sleep(PERIOD_S)  # B's transfer is slow, too
            assert waiting_b.result(60) == wanted
    assert cut_short > 0


def test_c2_aborted_transfers_leak_nothing(service: Service, reference: LLM) -> None:
    """Two hundred requests of four blocks, each cancelled after up to 300 ms, while the sender is slow."""
    wanted = expected(reference, 4 * CHUNK, max_tokens=16)[0]
    delays = [random.Random(number).uniform(0, 0.3) for number in range(200)]

    def cancel_after(delay_s: float) -> bool:
        call = service.generation.Generate.future(request_of(4 * CHUNK, max_tokens=16), timeout=60)
        time.sleep(delay_s)
        call.cancel()
        return bool(call.cancelled())

    with service.slow_sender(), ThreadPoolExecutor(MANY) as threads:
        cancelled = list(threads.map(cancel_after, delays))
    assert sum(cancelled) > 100
    service.wait_idle()
    assert service.bits(request_of(4 * CHUNK, max_tokens=16)) == wanted


def test_c11_cancelled_prompts_do_not_hold_up_the_next_one(service: Service) -> None:
    """Ten long prompts are cancelled after 100 ms; a short one then waits for none of what they had left to do."""
    long = [request_of(POOL_BLOCKS * CHUNK - 1, max_tokens=1, number=number) for number in range(10)]
    short = request_of(CHUNK, max_tokens=1)
    idle_s = min(_time_of(service, short) for _ in range(3))
    started_s = time.monotonic()
    for call in [service.generation.Generate.future(request, timeout=60) for request in long]:
        call.result(60)
    all_long_s = time.monotonic() - started_s

    def after_cancelled() -> float:
        calls = [service.generation.Generate.future(request, timeout=60) for request in long]
        time.sleep(min(0.1, all_long_s / 5))
        for call in calls:
            call.cancel()
        return _time_of(service, short)

    # Two times the idle one and a chunk, where nothing else disturbs; what is left of the long ones takes far longer,
    # every time, while a busy machine holds the short one up now and then.
    after_s = min(after_cancelled() for _ in range(3))
    assert after_s < max(3 * idle_s, all_long_s / 3), (idle_s, all_long_s)
    service.wait_idle()


def _time_of(service: Service, request: generation_pb2.GenerateRequest) -> float:
    started_s = time.monotonic()
    service.generation.Generate(request, timeout=60)
    return time.monotonic() - started_s


def test_c12_requests_that_outgrow_the_decode_pool_all_complete_and_equal(service: Service, reference: LLM) -> None:
    """The pool holds one and a half requests of their final size, and eight of them run."""
    final_tokens = POOL_BLOCKS * CHUNK * 2 // 3
    prompt_tokens = CHUNK - 2
    max_tokens = final_tokens - prompt_tokens
    wanted = expected(reference, prompt_tokens, max_tokens=max_tokens, numbers=range(MANY))
    requests = [request_of(prompt_tokens, max_tokens=max_tokens, number=number) for number in range(MANY)]
    with ThreadPoolExecutor(MANY) as threads:
        responses = list(threads.map(lambda request: service.generation.Generate(request, timeout=60), requests))
    for response, bits in zip(responses, wanted, strict=True):
        assert bits_of_response(response, transport=service.transport) == bits
    computed_again = sum(response.placement.decode_computed_prompt_tokens for response in responses)
    assert computed_again > 0, "nothing was preempted"
