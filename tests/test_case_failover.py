"""The cases C3, C8, C9, C10, C15 and C18, a decode worker's death in the middle of streams, and a poisoned request.

Real processes and a small model whose rows do not depend on each other, so that answers can be compared exactly. Every
test ends with all blocks of all workers free.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from case_cluster import (
    LEASE_S,
    Answer,
    CaseCluster,
    case_cluster,
    choices_of_unary,
    collect,
    collect_choices,
    of_unary,
    prompt_of,
    request,
)
from chaos.cases import make_chaos_model
from faulty_worker import MARK, Wrong
from harness import wait_until
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.errors import StaleHandle, TransferError
from twinstage.rpc.clients import WorkerConnection
from twinstage.types import KvGrant, RequestId, SamplingParameters, SequenceSpec
from twinstage.v1 import admin_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.xdist_group("cases"), pytest.mark.timeout(150)]

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])
LATE_S = 1.5  # more than any bound here, for a machine that others use as well
SLOW = (MARK, Wrong.SLOW_DECODE)  # no machine is too fast for the fault to hit in the middle
_salts = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chaos_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseCluster]:
    with case_cluster(tmp_path_factory.mktemp("cases"), model) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: CaseCluster, transport: str) -> Iterator[CaseCluster]:
    """The cluster; afterwards all is as it was."""
    yield shared
    dead = shared.revive()
    shared.processes.wait_ready(*shared.by_name.values())
    shared.wait_ready(transport)
    shared.wait_idle(*shared.workers_of(transport))
    assert not dead


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[LLM]:
    with LLM(str(model), LlmOptions(weights="fp32", threads=1, kv_cache_bytes=32 << 20, max_model_len=4096)) as llm:
        yield llm


class Streams:
    """Several streams that are read at once, each on a thread."""

    def __init__(
        self, cluster: CaseCluster, transport: str, requests: Sequence[generation_pb2.GenerateRequest]
    ) -> None:
        self._channel = grpc.insecure_channel(cluster.by_name[f"router-{transport}"].address)
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._threads = ThreadPoolExecutor(len(requests))
        self.counts = [0] * len(requests)
        self.futures: list[Future[Answer]] = [
            self._threads.submit(self._read, stub.GenerateStream(made, timeout=120), index)
            for index, made in enumerate(requests)
        ]

    def _read(self, events: Iterator[generation_pb2.GenerateStreamResponse], index: int) -> Answer:
        def counted() -> Iterator[generation_pb2.GenerateStreamResponse]:
            for event in events:
                self.counts[index] += len(event.delta.token_ids)
                yield event

        return collect(counted())

    def wait_tokens(self, count: int) -> None:
        """Until every stream has so many, or has ended."""
        wait_until(
            lambda: all(future.done() or got >= count for got, future in zip(self.counts, self.futures, strict=True)),
            timeout_s=60,
            what=f"{count} tokens of each stream",
        )

    def answers(self) -> list[Answer]:
        try:
            return [future.result(120) for future in self.futures]
        finally:
            self.close()

    def close(self) -> None:
        self._channel.close()
        self._threads.shutdown()


def fresh(length: int, *, marks: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A prompt that nobody has seen before."""
    return prompt_of(length, salt=next(_salts), marks=marks)


def undisturbed(
    cluster: CaseCluster, transport: str, requests: Sequence[generation_pb2.GenerateRequest]
) -> list[Answer]:
    with cluster.stub(transport) as stub:
        calls = [stub.Generate.future(made, timeout=60) for made in requests]
        return [of_unary(call.result()) for call in calls]


def _many_kinds(cluster: CaseCluster, transport: str) -> list[generation_pb2.GenerateRequest]:
    """Requests of 400 tokens with everything that a break in the middle could spoil."""
    plain, seeded = fresh(40, marks=SLOW), fresh(70)
    whole = undisturbed(cluster, transport, [request(plain, max_tokens=400)])[0].text
    far = whole[-25:-13]  # may occur before; then it ends there, with and without a break
    return [
        request(plain, max_tokens=400),
        request(seeded, max_tokens=400, seed=7, logprobs=2),
        request(plain, max_tokens=400, stop=[far], include_stop_str_in_output=True, min_tokens=300),
        request(seeded, max_tokens=400, seed=8, ignore_eos=False, min_tokens=350),
        _document(plain),
    ]


def _document(prompt: tuple[int, ...]) -> generation_pb2.GenerateRequest:
    """A JSON document of some 400 tokens, which ends by its schema alone."""
    number = {"type": "integer", "minimum": 10, "maximum": 99}
    made = request(prompt, max_tokens=1000, seed=9)
    made.structured_output.json_schema = json.dumps(
        {"type": "array", "items": number, "minItems": 120, "maxItems": 120}
    )
    return made


# --- failover ---------------------------------------------------------------------------------------


@BOTH
def test_death_of_decode_in_the_middle_of_streams(cluster: CaseCluster, transport: str) -> None:
    requests = _many_kinds(cluster, transport)
    expected = undisturbed(cluster, transport, requests)
    streams = Streams(cluster, transport, requests)
    streams.wait_tokens(30)
    victim = next(name for name in (f"{transport}-0", f"{transport}-1") if cluster.load(name)[0].running)
    cluster.by_name[victim].kill()
    answers = streams.answers()
    cluster.restart(victim)
    assert [answer.content() for answer in answers] == [answer.content() for answer in expected]
    assert any(answer.retries for answer in answers)


@BOTH
def test_death_of_decode_in_the_middle_of_several_choices(cluster: CaseCluster, transport: str, reference: LLM) -> None:
    """Three choices, as one engine makes them, and the same when their decode worker dies in the middle."""
    prompt = fresh(41, marks=SLOW)
    made = request(prompt, max_tokens=250, seed=7, n=3, logprobs=1)
    limits = GenerationLimits(max_tokens=250, ignore_eos=True)
    expected = reference.generate([prompt], SamplingParameters(temperature=0.8, seed=7), n=3, limits=limits)
    with cluster.stub(transport) as stub:
        unary = stub.Generate(made, timeout=60)
        whole = choices_of_unary(unary)
        assert [tuple(answer.token_ids) for answer in whole.by_index.values()] == [it.token_ids for it in expected]
        assert len({it.token_ids for it in expected}) == 3
        assert whole.usage == (41, 750)
        assert unary.placement.kv_bytes > 0
        events = stub.GenerateStream(made, timeout=120)
        got = 0

        def counted() -> Iterator[generation_pb2.GenerateStreamResponse]:
            nonlocal got
            for event in events:
                got += len(event.delta.token_ids)
                yield event

        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(lambda: collect_choices(counted()))
            wait_until(lambda: got >= 60 or reading.done(), timeout_s=60, what="tokens of all choices")
            victim = next(name for name in (f"{transport}-0", f"{transport}-1") if cluster.load(name)[0].running)
            cluster.by_name[victim].kill()
            answer = reading.result(120)
    cluster.restart(victim)
    assert answer.content() == whole.content()
    assert answer.retries


@BOTH
def test_a_poisoned_request_kills_two_workers_and_no_request_beside_it(cluster: CaseCluster, transport: str) -> None:
    innocent = [request(fresh(30), max_tokens=150, seed=index) for index in range(4)]
    expected = undisturbed(cluster, transport, innocent)
    ended = threading.Event()
    died: list[str] = []

    def bring_back() -> None:
        """As an operator's supervisor does."""
        while not ended.wait(0.05):
            for name in (f"{transport}-0", f"{transport}-1"):
                if cluster.by_name[name].process.poll() is not None:
                    died.append(name)
                    cluster.restart(name)

    streams = Streams(cluster, transport, innocent)
    streams.wait_tokens(5)
    with ThreadPoolExecutor(1) as supervisor, cluster.stub(transport) as stub:
        bringing_back = supervisor.submit(bring_back)
        try:
            poison = fresh(40, marks=(MARK, Wrong.DEATH_ON_DECODE))
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request(poison, max_tokens=50, request_id=f"poison-{transport}"), timeout=120)
            answers = streams.answers()
            # The router knows of the last death before its process is gone.
            wait_until(lambda: len(died) >= 2, timeout_s=20, what="the second worker is dead")
        finally:
            ended.set()
            bringing_back.result()
    assert _reason(caught.value) == (grpc.StatusCode.INTERNAL, "POISONED_REQUEST")
    assert len(died) == 2
    assert [answer.content() for answer in answers] == [answer.content() for answer in expected]
    named = [event for event in _router_log(cluster, transport) if event["event"] == "poisoned request refused"]
    assert named[-1]["request_id"] == f"poison-{transport}"
    assert len(named[-1]["workers"]) == 2


def _reason(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return error.code(), info.reason  # type: ignore[attr-defined]


def _router_log(cluster: CaseCluster, transport: str) -> list[dict[str, object]]:
    return list(cluster.by_name[f"router-{transport}"].events())


# --- C3 ---------------------------------------------------------------------------------------------


@BOTH
async def test_c3_decode_refuses_after_prefill_finished(cluster: CaseCluster, transport: str) -> None:
    """The grant was taken back before the prompt was computed: prefill's blocks come back, and decode's were."""
    prefill = WorkerConnection(cluster.by_name["prefill-1"].address)
    decode = WorkerConnection(cluster.by_name[f"{transport}-0"].address)
    session = await decode.open_session(timeout_s=10)
    reading = asyncio.create_task(session.run())
    spec = SequenceSpec(
        request_id=RequestId("stranded"),
        prompt_token_ids=fresh(300),
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=20,
    )
    try:
        with session.subscribe(spec.request_id), session.reserving(spec, deadline_s=30) as reservation:
            grant, _ = await reservation.granted()
            session.abort(spec.request_id)
            await asyncio.to_thread(cluster.wait_idle, f"{transport}-0")
            with pytest.raises((StaleHandle, TransferError)):
                await _handed_over(prefill, spec, grant)
        await asyncio.to_thread(cluster.wait_idle, "prefill-1", timeout_s=LATE_S)
    finally:
        session.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await prefill.close()
        await decode.close()


async def _handed_over(prefill: WorkerConnection, spec: SequenceSpec, grant: KvGrant) -> None:
    with prefill.prefill(spec, grant, timeout_s=30) as call:
        await call.first_token()
        await call.handed_over()


def _in_every_phase() -> list[generation_pb2.GenerateRequest]:
    """Some are computed and handed over while others decode."""
    lengths = (20, 60, 500, 700, 900, 1100)
    return [request(fresh(length, marks=SLOW), max_tokens=600, seed=length) for length in lengths]


@BOTH
def test_c3_router_dies_between_the_legs(cluster: CaseCluster, transport: str) -> None:
    streams = Streams(cluster, transport, _in_every_phase())
    wait_until(lambda: sum(streams.counts) > 10, timeout_s=30, what="tokens")
    workers = cluster.workers_of(transport)
    assert not all(cluster.is_idle(name) for name in workers)
    router = cluster.by_name[f"router-{transport}"]
    router.kill()
    cluster.wait_idle(*workers, timeout_s=LEASE_S + LATE_S)
    for future in streams.futures:
        with pytest.raises(grpc.RpcError):
            future.result(10)
    streams.close()
    cluster.restart(f"router-{transport}")
    cluster.processes.wait_ready(cluster.by_name[f"router-{transport}"])
    assert all(cluster.by_name[name].process.poll() is None for name in workers)


@BOTH
def test_c3_router_is_stopped_and_goes_on(cluster: CaseCluster, transport: str) -> None:
    """Workers free what a silent router holds within the lease; when it speaks again, its streams go on elsewhere."""
    requests = [request(fresh(50, marks=SLOW), max_tokens=800, seed=1)]  # which take longer than the lease
    expected = undisturbed(cluster, transport, requests)
    streams = Streams(cluster, transport, requests)
    streams.wait_tokens(20)
    decode = [f"{transport}-0", f"{transport}-1"]
    assert not all(cluster.is_idle(name) for name in decode)
    with cluster.stopped(f"router-{transport}"):
        cluster.wait_idle(*decode, timeout_s=LEASE_S + LATE_S)
    answers = streams.answers()
    assert [answer.content() for answer in answers] == [answer.content() for answer in expected]
    assert answers[0].retries


# --- C8 ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("wrong", [Wrong.FIRST_CHUNK, Wrong.LAST_CHUNK])
def test_c8_prefill_fails_inside_the_forward_pass(cluster: CaseCluster, transport: str, wrong: Wrong) -> None:
    """prefill-0 fails at such prompts, prefill-1 does not."""
    retries = []
    with cluster.stub(transport) as stub:
        for _ in range(4):
            marked = request(fresh(100, marks=(MARK, wrong)), max_tokens=8)
            began_s = time.monotonic()
            answer = of_unary(stub.Generate(marked, timeout=30))
            assert time.monotonic() - began_s < 2.0 + LATE_S
            assert len(answer.token_ids) == 8
            retries.append(answer.retries)
        assert max(retries) == 1, "one of them came to the worker that fails"
        with cluster.stopped("prefill-1"):
            wait_until(
                lambda: cluster.table(transport)["prefill-1"].state == admin_pb2.WORKER_STATE_LOST,
                timeout_s=10,
                what="the sound worker is lost",
            )
            began_s = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request(fresh(100, marks=(MARK, wrong)), max_tokens=8), timeout=30)
            assert time.monotonic() - began_s < 2.0 + LATE_S
            assert _reason(caught.value) == (grpc.StatusCode.UNAVAILABLE, "COMPUTE_FAILED")
            cluster.wait_idle(f"{transport}-0", f"{transport}-1", "prefill-0", timeout_s=LATE_S)


# --- C9, C10 ----------------------------------------------------------------------------------------


@BOTH
def test_c9_prefill_killed_and_restarted_at_the_same_address(cluster: CaseCluster, transport: str) -> None:
    decode = {name: cluster.by_name[name].pid for name in (f"{transport}-0", f"{transport}-1")}
    with cluster.stub(transport) as stub:
        call = stub.Generate.future(request(fresh(900, marks=(MARK, Wrong.SLOW_PREFILL)), max_tokens=20), timeout=60)
        wait_until(
            lambda: any(cluster.load(name)[0].running for name in ("prefill-0", "prefill-1")),
            timeout_s=10,
            what="the prompt is computed",
        )
        victim = next(name for name in ("prefill-0", "prefill-1") if cluster.load(name)[0].running)
        cluster.by_name[victim].kill()
        assert len(of_unary(call.result(60)).token_ids) == 20
        cluster.restart(victim)
        cluster.processes.wait_ready(cluster.by_name[victim])
        cluster.wait_ready(transport)
        for _ in range(10):
            assert len(of_unary(stub.Generate(request(fresh(40), max_tokens=8), timeout=60)).token_ids) == 8
    assert cluster.load(victim)[0].finished > 0, "it takes part again"
    assert all(cluster.by_name[name].process.poll() is None for name in decode)
    assert {name: cluster.by_name[name].pid for name in decode} == decode


@BOTH
def test_c10_streams_go_on_while_prefill_is_stopped(cluster: CaseCluster, transport: str) -> None:
    requests = [request(fresh(20), max_tokens=700, seed=index) for index in range(8)]
    streams = Streams(cluster, transport, requests)
    streams.wait_tokens(100)
    with cluster.stopped("prefill-0", "prefill-1"):
        stopped_s = time.monotonic()
        streams.wait_tokens(400)
        continued_s = time.monotonic()
        serving = health_pb2.HealthCheckResponse.SERVING
        for name in (f"{transport}-0", f"{transport}-1"):
            with grpc.insecure_channel(cluster.by_name[name].address) as channel:
                assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == serving
    answers = streams.answers()
    assert [(len(answer.token_ids), answer.retries) for answer in answers] == [(700, 0)] * 8
    normal, meanwhile = [], []
    for times in (answer.times for answer in answers):
        for before, after in itertools.pairwise(times):
            (meanwhile if before >= stopped_s and after <= continued_s else normal).append(after - before)
    # Not the largest gaps: those are the work of whoever else uses this machine.
    assert statistics.mean(meanwhile) < 3 * statistics.mean(normal) + 0.01


# --- C15 --------------------------------------------------------------------------------------------


@BOTH
def test_c15_no_token_is_resampled_doubled_or_lost(cluster: CaseCluster, transport: str, reference: LLM) -> None:
    prompts = [fresh(10 + 7 * index) for index in range(20)]
    sampling = [SamplingParameters(temperature=0.8, seed=index) for index in range(20)]
    limits = GenerationLimits(max_tokens=24, ignore_eos=True)
    expected = [
        reference.generate([prompt], replace(choice), limits=limits)[0]
        for prompt, choice in zip(prompts, sampling, strict=True)
    ]
    requests = [request(prompt, max_tokens=24, seed=index) for index, prompt in enumerate(prompts)]
    unary = undisturbed(cluster, transport, requests)
    streamed = Streams(cluster, transport, requests).answers()
    assert [tuple(answer.token_ids) for answer in unary] == [tuple(result.token_ids) for result in expected]
    assert [answer.content() for answer in streamed] == [answer.content() for answer in unary]
    for answer, prompt in zip(streamed, prompts, strict=True):
        assert answer.usage == (len(prompt), len(answer.token_ids)) == (len(prompt), 24)


# --- C18 --------------------------------------------------------------------------------------------


def _late(cluster: CaseCluster, transport: str) -> float:
    """How long a call with a deadline of 2 s takes that must not end before."""
    with cluster.stub(transport) as stub:
        began_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request(fresh(64), max_tokens=8), timeout=2.0)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        return time.monotonic() - began_s


@BOTH
async def test_c18_deadline_while_decode_is_full(cluster: CaseCluster, transport: str) -> None:
    """Everything on both decode workers is reserved by another router, and never filled."""
    names = [f"{transport}-0", f"{transport}-1"]
    connections = [WorkerConnection(cluster.by_name[name].address) for name in names]
    sessions = [await connection.open_session(timeout_s=10) for connection in connections]
    reading = [asyncio.create_task(session.run()) for session in sessions]
    try:
        async with asyncio.timeout(30):
            for name, session in zip(names, sessions, strict=True):
                await _fill(session, (await asyncio.to_thread(cluster.load, name))[1])
        took_s = await asyncio.to_thread(_late, cluster, transport)
        assert 2.0 <= took_s < 2.3 + LATE_S
        await asyncio.to_thread(cluster.wait_idle, "prefill-0", "prefill-1", timeout_s=LATE_S)
        for name in names:
            load, _ = await asyncio.to_thread(cluster.load, name)
            assert not load.waiting, "the reservation that waited is gone"
    finally:
        for session, connection, task in zip(sessions, connections, reading, strict=True):
            session.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await connection.close()


async def _fill(session: object, num_blocks: int) -> None:
    """Reserve all blocks of a worker but one."""
    number = 0
    while num_blocks > 1:
        take = min(num_blocks - 1, 200)
        spec = SequenceSpec(
            request_id=RequestId(f"full-{next(_salts)}"),
            prompt_token_ids=fresh(16 * take),
            sampling=SamplingParameters(),
            max_tokens=2,
        )
        reserving = session.reserving(spec, deadline_s=60)  # type: ignore[attr-defined]
        await reserving.__enter__().granted()  # kept until the session ends
        num_blocks -= take
        number += 1


@BOTH
def test_c18_deadline_while_prefill_is_full(cluster: CaseCluster, transport: str) -> None:
    """Long prompts from elsewhere wait on both prefill workers."""
    connections = asyncio.new_event_loop()

    async def flood() -> None:
        workers = [WorkerConnection(cluster.by_name[name].address) for name in ("prefill-0", "prefill-1")]
        try:
            await asyncio.gather(*(_long_prompt(worker) for worker in workers for _ in range(40)))
        finally:
            for worker in workers:
                await worker.close()

    task = connections.create_task(flood())
    thread = threading.Thread(target=_run, args=(connections, task))
    thread.start()
    try:
        wait_until(
            lambda: all(cluster.load(name)[0].waiting > 30 for name in ("prefill-0", "prefill-1")),
            timeout_s=30,
            what="prefill is full",
        )
        took_s = _late(cluster, transport)
        assert 2.0 <= took_s < 2.3 + LATE_S
        cluster.wait_idle(f"{transport}-0", f"{transport}-1", timeout_s=LATE_S)
    finally:
        connections.call_soon_threadsafe(task.cancel)
        thread.join(30)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    async def wait() -> None:
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(wait())
    loop.close()


async def _long_prompt(worker: WorkerConnection) -> None:
    spec = SequenceSpec(
        request_id=RequestId(f"flood-{next(_salts)}"),
        prompt_token_ids=fresh(2000),
        sampling=SamplingParameters(),
        max_tokens=1,
    )
    with worker.prefill(spec, None, timeout_s=120) as call:
        await call.first_token()
