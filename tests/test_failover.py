"""What a failure leaves behind: who is blamed, what the client is told and charged, and what placement remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from fake_workers import FakeDecode, FakePrefill, Script, make_model, until
from flow_rig import Answer, Rig, expected_text, request, running
from router.prefix_memory import PrefixTrail
from twinstage.errors import (
    ComputeFailed,
    DeadlineExceeded,
    Draining,
    KvExhausted,
    TaskNotSupported,
    TransferError,
    TwinstageError,
)
from twinstage.types import RawGenerationRequest, RequestId, TokenPrompt

BEGINNING = tuple(3 + index % 5 for index in range(200))
STEPS = 192  # its tokens in whole steps of the memory
LONG = {"model": make_model(max_model_len=512), "total_blocks": 4096}


def long_request(max_tokens: int = 3) -> RawGenerationRequest:
    return request(max_tokens, prompt=TokenPrompt(token_ids=BEGINNING))


def held(rig: Rig) -> Mapping[str, int]:
    """Who has how much of the beginning, as placement knows it."""
    trail = PrefixTrail(rig.workers.prefixes, model_fingerprint="m1", salt="")
    return {worker.worker_id: count for worker, count in trail.held_tokens(BEGINNING).items()}


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("first_token", ComputeFailed("out of luck")),
        ("hand_over", TransferError("checksum")),
        ("decode 5", ComputeFailed("mid-way")),
    ],
)
async def test_cached_tokens_are_what_the_prompt_saved_and_not_what_a_replay_finds(
    monkeypatch: pytest.MonkeyPatch, phase: str, error: TwinstageError
) -> None:
    monkeypatch.setattr("router.attempt.RECEIVERS_WORD_S", 0.05)
    async with running() as rig:
        prefill, decode = rig.cluster.prefill[0], rig.cluster.decode[0]
        prefill.cached_tokens = [2, 4]  # the second time, what was computed the first time
        (decode if phase.startswith("decode") else prefill).script.fail(phase, error)
        answer = await rig.collect(request(12))
        assert answer.text == expected_text(rig.cluster, 12)
        assert answer.summary.placement.retries == 1
        usage = answer.summary.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (5, 12, 2)


# --- what placement remembers ---------------------------------------------------------------------


async def test_a_worker_is_remembered_for_what_it_got() -> None:
    async with running(**LONG) as rig:
        prefill, decode = rig.cluster.prefill[0], rig.cluster.decode[0]
        decode.script.fail("reserve", KvExhausted("full"), times=3)
        with pytest.raises(KvExhausted):
            await rig.collect(long_request())
        assert held(rig) == {}
        prefill.script.fail("first_token", ComputeFailed("always"), times=3)
        with pytest.raises(ComputeFailed):
            await rig.collect(long_request())
        assert held(rig) == {}
        prefill.script.fail("hand_over", TaskNotSupported("not by this worker"))
        with pytest.raises(TaskNotSupported):
            await rig.collect(long_request())
        assert held(rig) == {"prefill-0": STEPS}
        await rig.collect(long_request())
        assert held(rig) == {"prefill-0": STEPS, "decode-0": STEPS}


@pytest.mark.parametrize("phase", ["reserve", "first_token"])
async def test_what_is_given_up_is_not_expected_any_more(phase: str) -> None:
    async with running(**LONG) as rig:
        worker = rig.cluster.decode[0] if phase == "reserve" else rig.cluster.prefill[0]
        worker.script.stall(phase)
        call = asyncio.create_task(rig.collect(long_request()))
        await worker.script.reached(phase).wait()
        assert held(rig) == {"prefill-0": STEPS, "decode-0": STEPS}, "it is on its way"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert held(rig) == {}


async def test_equal_prompts_that_arrive_together_meet() -> None:
    async with running(prefill=2, decode=2, **LONG) as rig:
        stalls = [worker.script.stall("reserve") for worker in rig.cluster.decode for _ in range(4)]
        calls = [asyncio.create_task(rig.collect(long_request())) for _ in range(4)]
        await until(lambda: len(rig.live) == 4 and held(rig), what="all placed")
        await asyncio.sleep(0.1)
        for go_on in stalls:
            go_on.set()
        placements = [(await call).summary.placement for call in calls]
        assert len({placement.prefill_worker for placement in placements}) == 1


async def test_what_was_under_way_at_a_reset_is_not_remembered() -> None:
    async with running(**LONG) as rig:
        script = rig.cluster.prefill[0].script
        go_on = script.stall("first_token")
        call = asyncio.create_task(rig.collect(long_request()))
        await script.reached("first_token").wait()
        rig.workers.prefixes.clear()
        go_on.set()
        await call
        assert held(rig) == {}


# --- who is blamed --------------------------------------------------------------------------------


async def on_its_way(rig: Rig, phase: str) -> tuple[asyncio.Task[Answer], FakePrefill, FakeDecode, RequestId]:
    """A request that has come to `phase` of a prefill worker, the workers that it is on, and its name there."""
    for worker in rig.cluster.prefill:
        worker.script.reached(phase).clear()
    call = asyncio.create_task(rig.collect(long_request(), is_streamed=False))
    await until(lambda: any(worker.script.reached(phase).is_set() for worker in rig.cluster.prefill), what=phase)
    prefill = next(worker for worker in rig.cluster.prefill if worker.script.reached(phase).is_set())
    decode = next(worker for worker in rig.cluster.decode if worker.reservations)
    return call, prefill, decode, RequestId(next(iter(decode.reservations)))


@pytest.mark.parametrize("phase", ["first_token", "hand_over"])
async def test_a_transfer_that_failed_without_another_word_is_tried_again_on_two_others(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr("router.attempt.SENDERS_WORD_S", 0.1)
    async with running(prefill=2, decode=2, **LONG) as rig:
        first = (await rig.collect(long_request())).summary.placement
        for worker in rig.cluster.prefill:
            worker.script.stall(phase)
        call, prefill, decode, request_id = await on_its_way(rig, phase)
        # Both have the prompt: without the failure, they would be chosen again and again.
        assert (prefill.description.worker_id, decode.description.worker_id) == (
            first.prefill_worker,
            first.decode_worker,
        )
        rig.cluster.prefill[1 - rig.cluster.prefill.index(prefill)].script = Script()
        decode.fail(request_id, TransferError("a checksum is wrong"))
        second = (await call).summary.placement
        assert second.retries == 1
        assert second.prefill_worker != first.prefill_worker
        assert second.decode_worker != first.decode_worker


@pytest.mark.parametrize(
    "error", [TransferError("the sender aborted"), DeadlineExceeded("the deadline came before the KV blocks")]
)
async def test_the_senders_own_word_on_a_transfer_counts(
    monkeypatch: pytest.MonkeyPatch, error: TwinstageError
) -> None:
    monkeypatch.setattr("router.attempt.SENDERS_WORD_S", 20.0)
    async with running(**LONG) as rig:
        go_on = rig.cluster.prefill[0].script.stall("first_token", then=TaskNotSupported("not by this worker"))
        call, _, decode, request_id = await on_its_way(rig, "first_token")
        decode.fail(request_id, error)
        await asyncio.sleep(0.05)  # the router hears of it
        go_on.set()
        with pytest.raises(TaskNotSupported, match="not by this worker"):
            await call


async def test_the_receivers_own_word_on_a_transfer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.attempt.RECEIVERS_WORD_S", 20.0)
    async with running(decode=2, **LONG) as rig:
        script = rig.cluster.prefill[0].script
        go_on = script.stall("hand_over", then=TransferError("the receiver closed the connection"))
        call, _, decode, request_id = await on_its_way(rig, "hand_over")
        go_on.set()
        await asyncio.sleep(0.05)  # the router hears of the sender's failure
        decode.fail(request_id, Draining("this decode worker was shut down"))
        await asyncio.sleep(0.05)
        assert await call
        assert not decode.served, "a worker that is shutting down is not asked again"
        assert rig.cluster.prefill[0].served == 2
