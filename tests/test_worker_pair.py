"""A prefill and a decode worker as real processes on a tiny model, driven by a small router of the test's own.

What comes out must equal the engine in one process; whatever goes wrong, all KV blocks must come back.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from harness import ProcessCluster, RoleProcess
from small_router import Generation, SmallRouter, expected_of, in_single_precision, small_router, spec_of
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotFound,
    TaskNotSupported,
    TransferError,
    WorkerLost,
)
from twinstage.types import (
    Finish,
    FinishReason,
    PoolingInput,
    RequestId,
    SamplingParameters,
)
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.xdist_group("worker_pair")

POOL_BLOCKS = 96
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens x layers x key and value x kv heads x dimensions x bytes
FLAGS = ("--kv-cache-bytes", str(POOL_BLOCKS * BLOCK_BYTES), "--max-tokens-per-step", "16")
FLAGS += ("--weights", "fp32")  # the bits of a row depend on nothing else in its batch


@pytest.fixture(scope="module")
def pair(prepared_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RoleProcess]]:
    """A prefill worker, a decode worker, and a prefill worker that knows tcp only."""
    with ProcessCluster(tmp_path_factory.mktemp("pair")) as cluster:
        tcp_only = cluster.launch_worker("prefill", str(prepared_tiny_model), *FLAGS, "--kv-transports", "tcp")
        both = cluster.start_workers(str(prepared_tiny_model), flags=FLAGS)
        cluster.wait_ready(tcp_only)
        yield [*both, tcp_only]


@pytest.fixture(scope="module")
def reference(prepared_tiny_model: Path) -> Iterator[LLM]:
    options = LlmOptions(weights="fp32", kv_cache_bytes=512 * BLOCK_BYTES, max_tokens_per_step=16, threads=1)
    with LLM(str(prepared_tiny_model), options) as llm:
        yield llm


@pytest.fixture
async def router(pair: list[RoleProcess]) -> AsyncIterator[SmallRouter]:
    async with small_router(pair) as router:
        yield router
        await router.all_blocks_free()


# --- equality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_the_pair_equals_the_engine_in_one_process(router: SmallRouter, reference: LLM, transport: str) -> None:
    """Lengths around block and chunk borders, greedy and seeded, all at once."""
    seeded = SamplingParameters(temperature=0.8, top_p=0.95, top_k=40, seed=1234, repetition_penalty=1.1)
    lengths = (1, 15, 16, 17, 63, 64, 65, 130)
    specs = [
        spec_of(f"{transport}-{length}-{kind}", length, max_tokens=24, sampling=sampling, logprobs=3)
        for length in lengths
        for kind, sampling in (("greedy", None), ("seeded", seeded))
    ]
    generations = await asyncio.gather(*(router.generate(spec, transport=transport) for spec in specs))
    for spec, generation in zip(specs, generations, strict=True):
        tokens, finish = expected_of(reference, spec)
        assert generation.token_ids == tuple(token.token_id for token in tokens), spec.request_id
        assert generation.finish == finish
        for token, expected in zip(generation.tokens, tokens, strict=True):
            assert token == in_single_precision(expected)
        num_blocks = -(-len(spec.prompt_token_ids) // 16)
        assert generation.transport == transport
        missing = num_blocks - generation.cached_on_decode  # greedy and seeded requests have prompts in common
        assert generation.kv_bytes == generation.kv_bytes_received == missing * BLOCK_BYTES
        assert generation.computed_prompt_tokens == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_only_what_decode_lacks_crosses_whatever_the_caches_hold(
    router: SmallRouter, reference: LLM, transport: str
) -> None:
    """Every combination of cold, warm and partly warm caches: equal output, and the blocks that cross, to the byte."""
    sampling = SamplingParameters(temperature=0.8, top_p=0.95, seed=7)
    prefill = router.prefill_by(transport)
    caches = {"prefill": prefill, "decode": router.decode}
    answers: dict[int, tuple[int, ...]] = {}

    async def turn(length: int, *, cached: int, crossing: int, prompt: tuple[int, ...] = ()) -> None:
        """`cached`: prompt tokens that prefill does not compute; `crossing`: blocks that decode does not have."""
        spec = spec_of(f"turn-{transport}", 200, sampling=sampling, max_tokens=20, logprobs=1)
        spec = replace(spec, prompt_token_ids=prompt or spec.prompt_token_ids[:length])
        generation = await router.generate(spec, transport=transport)
        tokens, _ = expected_of(reference, spec)
        assert generation.token_ids == tuple(token.token_id for token in tokens)
        assert generation.tokens == [in_single_precision(token) for token in tokens]
        assert (generation.cached_prompt_tokens, generation.kv_bytes // BLOCK_BYTES) == (cached, crossing)
        assert generation.kv_bytes == generation.kv_bytes_received
        answers[length] = generation.token_ids

    async def reset(*names: str) -> None:
        for name in names:
            await caches[name].reset_prefix_cache(timeout_s=5.0)

    await reset("prefill", "decode")
    await turn(70, cached=0, crossing=5)
    await turn(70, cached=64, crossing=1)  # only the partly filled block
    await turn(64, cached=48, crossing=0)  # decode has all; the last token is computed for its logits
    await turn(150, cached=64, crossing=6)
    await reset("prefill")
    await turn(150, cached=0, crossing=1)
    await reset("decode")
    await turn(150, cached=144, crossing=10)
    await reset("decode")
    await turn(70, cached=64, crossing=5)
    await turn(150, cached=144, crossing=6)
    prompt = (*spec_of("next", 200).prompt_token_ids[:70], *answers[70], 5, 6, 7)
    # Of 70 + 20 tokens prefill knows the prompt's 64, and decode what it computed, too.
    await turn(93, prompt=prompt, cached=64, crossing=1)
    load = await router.load(router.decode)
    assert load.cached_kv_blocks >= 10
    assert load.prefix_looked_up_blocks > load.prefix_found_blocks > 0


async def test_a_replayed_request_goes_on_where_it_was(router: SmallRouter, reference: LLM) -> None:
    spec = spec_of("replay", 40, max_tokens=20, sampling=SamplingParameters(temperature=0.9, seed=9))
    tokens, _ = expected_of(reference, spec)
    token_ids = tuple(token.token_id for token in tokens)
    generation = await router.generate(replace(spec, resumed_token_ids=token_ids[:7]))
    assert generation.token_ids == token_ids[7:]


async def test_more_requests_than_the_pool_holds_are_all_right(router: SmallRouter, reference: LLM) -> None:
    """To the last bit of their log probabilities, though they are computed in batches of all sizes."""
    specs = [spec_of(f"many-{index}", 60 + index, max_tokens=40, logprobs=2) for index in range(24)]
    generations = await asyncio.gather(*(router.generate(spec) for spec in specs))
    for spec, generation in zip(specs, generations, strict=True):
        tokens, _ = expected_of(reference, spec)
        assert generation.tokens == [in_single_precision(token) for token in tokens], spec.request_id


# --- nothing to hand over -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["max_tokens", "end_of_sequence"])
async def test_a_first_token_that_is_the_last_moves_nothing(router: SmallRouter, reference: LLM, case: str) -> None:
    spec = spec_of(f"one-{case}", 70, max_tokens=8)
    first = expected_of(reference, spec)[0][0].token_id
    ends = {"max_tokens": replace(spec, max_tokens=1)}
    spec = ends.get(case, replace(spec, stop_token_ids=frozenset({first})))
    received = (await router.load(router.decode)).kv_bytes_received
    generation = await router.generate(spec)
    assert generation.token_ids == (first,)
    assert generation.finish is not None
    if case == "max_tokens":
        assert generation.finish.reason is FinishReason.LENGTH
    else:
        assert generation.finish == Finish(reason=FinishReason.STOP, matched_token_id=first)
    assert generation.kv_bytes == 0
    await router.all_blocks_free()
    assert (await router.load(router.decode)).kv_bytes_received == received


async def test_one_token_needs_no_decode_worker(router: SmallRouter) -> None:
    with router.prefill.prefill(spec_of("alone", 20, max_tokens=1), None, timeout_s=20.0) as call:
        first = await call.first_token()
        assert first.chunks[0].finish is not None
        with pytest.raises(WorkerLost):  # the stream ends here
            await call.handed_over()


# --- cancellation and failure ---------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("phase", ["reserved", "computing", "first_token", "handed_over", "decoding"])
async def test_a_request_may_end_in_every_phase(
    router: SmallRouter, reference: LLM, phase: str, transport: str
) -> None:
    spec = spec_of(f"end-{phase}-{transport}", 300, max_tokens=150)
    with router.session.subscribe(spec.request_id) as subscription:
        grant, _ = await router.session.reserve(spec, deadline_s=30.0)
        if phase != "reserved":
            with router.prefill_by(transport).prefill(spec, grant, timeout_s=30.0) as call:
                if phase == "computing":
                    await asyncio.sleep(0.005)
                else:
                    await call.first_token()
                if phase in ("handed_over", "decoding"):
                    await call.handed_over()
            if phase == "decoding":
                await subscription.receive()
    await router.all_blocks_free()
    after = spec_of(f"after-{phase}-{transport}", 50)
    tokens, _ = expected_of(reference, after)
    assert (await router.generate(after)).token_ids == tuple(token.token_id for token in tokens)


async def test_cancelling_at_many_moments_leaks_nothing(router: SmallRouter, reference: LLM) -> None:
    async def cancelled(index: int) -> None:
        transport = ("shm", "tcp")[index % 2]
        task = asyncio.create_task(
            router.generate(spec_of(f"moment-{index}", 40 + 11 * index, max_tokens=30), transport=transport)
        )
        await asyncio.sleep(0.008 * index)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(cancelled(index) for index in range(24)))
    await router.all_blocks_free()
    after = spec_of("after-moments", 50)
    tokens, _ = expected_of(reference, after)
    assert (await router.generate(after)).token_ids == tuple(token.token_id for token in tokens)


async def test_a_hand_over_is_refused_after_an_abort(router: SmallRouter) -> None:
    spec = spec_of("aborted", 40)
    grant, _ = await router.session.reserve(spec, deadline_s=30.0)
    router.session.abort(spec.request_id)
    await router.all_blocks_free()
    with pytest.raises(TransferError):
        await router.prefill_with(spec, grant)


async def test_a_grant_with_a_wrong_token_is_refused(router: SmallRouter) -> None:
    spec = spec_of("forged", 40)
    with router.session.subscribe(spec.request_id):
        grant, _ = await router.session.reserve(spec, deadline_s=30.0)
        forged = replace(grant, token=b"x" * len(grant.token))
        with pytest.raises(TransferError):
            await router.prefill_with(spec, forged)


async def test_the_end_of_a_session_frees_all_it_had(pair: list[RoleProcess], router: SmallRouter) -> None:
    async with small_router(pair) as lost:
        for index in range(3):
            await lost.session.reserve(spec_of(f"reserved-{index}", 64), deadline_s=30.0)
        spec = spec_of("decoding", 64, max_tokens=300)
        with lost.session.subscribe(spec.request_id) as subscription:
            grant, _ = await lost.session.reserve(spec, deadline_s=30.0)
            await lost.prefill_with(spec, grant)
            await subscription.receive()
            lost.session.close()
            with pytest.raises(WorkerLost):
                await subscription.broken()
        await router.all_blocks_free()


# --- the door -------------------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused_with_the_right_error(router: SmallRouter) -> None:
    for length, error in ((512, InvalidRequest), (0, InvalidRequest)):
        with pytest.raises(error):
            await router.session.reserve(spec_of("wrong", length), deadline_s=5.0)
        with router.prefill.prefill(spec_of("wrong", length), None, timeout_s=5.0) as call, pytest.raises(error):
            await call.first_token()
    other_vocabulary = replace(spec_of("wrong", 4), prompt_token_ids=(1, 2, 100_000))
    with pytest.raises(InvalidRequest):
        await router.session.reserve(other_vocabulary, deadline_s=5.0)
    with pytest.raises(TaskNotSupported):
        await router.prefill.encode("e", [PoolingInput(token_ids=[1, 2])], normalize=True, timeout_s=5.0)


async def test_a_reservation_ends_at_its_deadline_when_the_pool_is_full(router: SmallRouter) -> None:
    for index in range(3):
        await router.session.reserve(spec_of(f"holder-{index}", 500), deadline_s=30.0)
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await router.session.reserve(spec_of("late", 16), deadline_s=0.5)
    assert 0.4 < asyncio.get_running_loop().time() - started_s < 5.0
    for index in range(3):
        router.session.abort(RequestId(f"holder-{index}"))


async def test_the_workers_describe_themselves(router: SmallRouter) -> None:
    prefill = await router.prefill.describe(timeout_s=5.0)
    decode = await router.decode.describe(timeout_s=5.0)
    assert (prefill.model, prefill.kv_layout_fingerprint) == (decode.model, decode.kv_layout_fingerprint)
    assert decode.total_kv_blocks == POOL_BLOCKS
    assert decode.kv_block_bytes == BLOCK_BYTES
    assert prefill.epoch != decode.epoch
    bundle = await router.decode.tokenizer_bundle(decode.model.tokenizer_fingerprint, timeout_s=5.0)
    assert b"tokenizer_json" in bundle
    with pytest.raises(NotFound):
        await router.decode.tokenizer_bundle("other", timeout_s=5.0)


async def test_a_session_begins_with_its_opening(pair: list[RoleProcess]) -> None:
    async def wrong() -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(abort=worker_pb2.SessionAbort(request_id="r"))

    async with grpc.aio.insecure_channel(pair[1].address) as channel:
        call = worker_pb2_grpc.DecodeServiceStub(channel).Session(wrong(), timeout=5.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def kill_during_hand_overs(router: SmallRouter, victim: RoleProcess) -> None:
    """Kill the prefill worker while prompts are on their way; each of them fails on one side or on both."""

    async def one(index: int) -> Generation:
        return await router.generate(spec_of(f"victim-{index}", 250 + index, max_tokens=200))

    attempts = [asyncio.create_task(one(index)) for index in range(6)]
    await asyncio.sleep(0.03)
    victim.kill()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*attempts, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    assert failures, "the worker was killed too late"
    for failure in failures:
        assert isinstance(failure, WorkerLost | TransferError), failure


# --- the end --------------------------------------------------------------------------------------


async def test_a_killed_prefill_worker_and_then_a_signal_for_the_others(
    prepared_tiny_model: Path, tmp_path: Path, reference: LLM
) -> None:
    """Kill -9 in the middle of hand-overs: the decode worker reports them and frees their blocks.

    SIGTERM while a request decodes: it completes, new ones are refused, nothing leaks, exit code 0.
    """
    with ProcessCluster(tmp_path) as cluster:
        started = await asyncio.to_thread(cluster.start_workers, str(prepared_tiny_model), prefill=2, flags=FLAGS)
        victim, *roles = started
        async with small_router([victim, roles[1]]) as router:
            await kill_during_hand_overs(router, victim)
            async with asyncio.timeout(15):
                async for load in router.decode.watch_load(interval_s=1.0):
                    if load.free_kv_blocks == POOL_BLOCKS:
                        break
        async with small_router(roles) as router:
            spec = spec_of("long", 64, max_tokens=250)
            tokens, _ = expected_of(reference, spec)
            running = asyncio.create_task(router.generate(spec))
            async with asyncio.timeout(15):
                loads = router.decode.watch_load(interval_s=1.0)
                async for load in loads:
                    if load.running:
                        break
                for role in roles:
                    role.send(signal.SIGTERM)
                async for load in loads:
                    if load.draining:
                        break
            with pytest.raises(Draining):
                await router.session.reserve(spec_of("late", 4), deadline_s=5.0)
            generation = await running
            assert generation.token_ids == tuple(token.token_id for token in tokens)
            await router.run
        for role in roles:
            assert await asyncio.to_thread(role.stop) == 0
            stopped = [event for event in role.events() if event.get("event") == "worker stopped"]
            assert [event["leaked_blocks"] for event in stopped] == [0], role.log_tail()
