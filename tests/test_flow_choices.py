"""Several choices, and several prompts, through a router: computed together, ended one by one, continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from fake_workers import BLOCK_BYTES, FakeDecode, Script, until
from flow_rig import Answer, Rig, collect, expected_text, request, running
from router import together
from router.admission.rules import check_fields
from router.failover import FailoverPolicy
from router.outbox import DeltaEvent, Event, FinishEvent, PromptEvent, SummaryEvent
from twinstage.errors import (
    ComputeFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PoisonedRequest,
    StreamBroken,
    TransferError,
)
from twinstage.types import (
    BatchPrompt,
    Finish,
    FinishReason,
    ProducedToken,
    RawGenerationRequest,
    RawRepetition,
    RawSampling,
    RawStopping,
    TextPrompt,
    WorkerLoad,
)

N = 3


def several(max_tokens: int = 8, n: int = N, **changes: object) -> RawGenerationRequest:
    return request(max_tokens, sampling=RawSampling(seed=7, n=n), **changes)


def expected(rig: Rig, count: int) -> list[str]:
    return [expected_text(rig.cluster, count, choice=index) for index in range(N)]


def texts(answer: Answer, count: int = N) -> list[str]:
    """All that a client has got, after a look at the order of events."""
    assert isinstance(answer.events[0], PromptEvent)
    assert isinstance(answer.events[-1], SummaryEvent)
    assert {event.index for event in answer.events if isinstance(event, DeltaEvent)} <= set(range(count))
    for index in range(count):
        answer.finish_of(index)
    return [answer.text_of(index) for index in range(count)]


# --- the ways of a request ------------------------------------------------------------------------


async def test_choices_are_prefilled_and_handed_over_once() -> None:
    async with running() as rig:
        answer = await rig.collect(several())
        assert texts(answer) == expected(rig, 8)
        assert len(set(texts(answer))) == N
        assert (await rig.collect(request(8))).text == texts(answer)[0], "the first one is what is given without n"
        (spec, _), (grant, _) = rig.cluster.prefill[0].specs, rig.cluster.prefill[0].grants
        assert (spec.num_choices, spec.sampling.choice_index) == (N, 0)
        assert grant is not None
        assert len(grant.block_ids) == 2
        usage, placement = answer.summary.usage, answer.summary.placement
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, N * 8)
        assert (placement.kv_bytes, placement.retries) == (2 * BLOCK_BYTES, 0)


async def test_choices_count_in_the_books_of_their_worker_as_long_as_they_last() -> None:
    async with running() as rig:
        go_on = rig.cluster.decode[0].script.stall("decode 2")
        call = asyncio.create_task(rig.collect(several()))
        await rig.cluster.decode[0].script.reached("decode 2").wait()
        (life,) = rig.workers.models["fake"].decode
        await until(lambda: life.candidate().running == N, what="three sequences")
        assert life.ledger.free_blocks(WorkerLoad(free_kv_blocks=64), 64) == 64 - (2 + N - 1)
        go_on.set()
        await call


async def test_one_token_of_each_needs_no_decode_worker() -> None:
    async with running() as rig:
        answer = await rig.collect(several(1))
        assert texts(answer) == expected(rig, 1)
        assert rig.cluster.prefill[0].grants == [None]
        assert answer.summary.placement.decode_worker == ""


async def test_a_stop_string_ends_its_own_choice_here_and_on_the_worker() -> None:
    async with running() as rig:
        whole = expected(rig, 30)
        stop = whole[1][4:7]
        assert all(stop not in whole[index] for index in (0, 2))
        answer = await rig.collect(several(stopping=RawStopping(max_tokens=30, stop=(stop,))))
        end = whole[1].index(stop)
        assert texts(answer) == [whole[0], whole[1][:end], whole[2]]
        assert answer.finish_of(1) == Finish(reason=FinishReason.STOP, matched_text=stop)
        assert answer.finish_of(0) == answer.finish_of(2) == Finish(reason=FinishReason.LENGTH)
        assert answer.summary.usage.completion_tokens == 60 + end + len(stop)
        decode = rig.cluster.decode[0]
        assert [index for _, index in decode.aborted_choices] == [1]
        assert not decode.aborted, "the request ended by itself"


async def test_a_stop_string_in_the_first_token_ends_its_choice_before_the_hand_over() -> None:
    async with running() as rig:
        whole = expected(rig, 10)
        assert len({text[0] for text in whole}) == N
        go_on = rig.cluster.prefill[0].script.stall("hand_over")
        stopping = RawStopping(max_tokens=10, stop=(whole[2][0],))
        call = asyncio.create_task(rig.collect(several(stopping=stopping)))
        decode = rig.cluster.decode[0]
        await until(lambda: decode.aborted_choices, what="the worker is told")
        go_on.set()
        answer = await call
        cut = [text.split(whole[2][0])[0] for text in whole]
        assert texts(answer) == cut
        assert cut[2] == ""


async def test_a_first_token_ends_its_choice_and_the_others_go_on() -> None:
    async with running() as rig:
        firsts = [ord(text[0]) for text in expected(rig, 1)]
        token_id = (await rig.collect(request(1))).token_ids[0]
        stopping = RawStopping(max_tokens=6, stop_token_ids=(token_id,))
        answer = await rig.collect(several(stopping=stopping))
        whole = expected(rig, 6)
        assert answer.finish_of(0) == Finish(reason=FinishReason.STOP, matched_token_id=token_id)
        assert texts(answer) == [text.split(chr(firsts[0]))[0] for text in whole]
        assert answer.summary.placement.decode_worker == "decode-0"
        await rig.cluster.assert_idle()


async def test_a_repetition_ends_its_own_choice() -> None:
    async with running() as rig:
        whole = expected(rig, 60)

        def end(text: str) -> int:
            return next((at for at in range(2, 61) if text[at - 1] == text[at - 2]), 60)

        assert len({end(text) for text in whole}) == N
        repetition = RawRepetition(max_pattern_size=1, min_count=2)
        stopping = RawStopping(max_tokens=55, repetition=repetition)
        answer = await rig.collect(several(stopping=stopping))
        assert texts(answer) == [text[: min(55, end(text))] for text in whole]
        await rig.cluster.assert_idle()


async def test_more_choices_than_a_worker_computes_are_refused_before_anything_is_queued() -> None:
    async with running() as rig:
        model = rig.workers.models["fake"]
        with pytest.raises(InvalidRequest) as caught:
            check_fields(several(n=9), model)
        (violation,) = caught.value.violations
        assert (violation.field, "at most 8" in violation.description) == ("sampling.n", True)
        check_fields(several(1, n=9), model)  # one token of each is the prefill worker's
        assert len((await rig.collect(several(1, n=9))).events) == 1 + 9 + 9 + 1


# --- failures -------------------------------------------------------------------------------------


async def test_before_any_token_the_whole_request_is_tried_again() -> None:
    async with running(prefill=2) as rig:
        for worker in rig.cluster.prefill:
            worker.script.fail("first_token", ComputeFailed("out of luck"))
        answer = await rig.collect(several())
        assert texts(answer) == expected(rig, 8)
        assert [spec.num_choices for worker in rig.cluster.prefill for spec in worker.specs] == [N] * 3
        assert answer.summary.placement.retries == 2


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("phase", ["hand_over", "decode 5"])
async def test_after_their_first_tokens_choices_go_on_one_by_one(phase: str, is_streamed: bool) -> None:
    async with running(prefill=2, decode=2) as rig:
        roles = rig.cluster.prefill if phase == "hand_over" else rig.cluster.decode
        error = TransferError("checksum") if phase == "hand_over" else ComputeFailed("mid-way")
        for worker in roles:
            worker.script.fail(phase, error)
        answer = await collect(rig.generation, several(12), is_streamed=is_streamed)
        assert texts(answer) == expected(rig, 12)
        assert answer.summary.usage.completion_tokens == N * 12, "no token twice"
        specs = [spec for worker in rig.cluster.prefill for spec in worker.specs if spec.resumed_token_ids]
        last = {spec.sampling.choice_index: spec for spec in specs}
        assert sorted(last) == list(range(N))
        assert {spec.num_choices for spec in specs} == {1}
        assert answer.summary.placement.retries in (1, 2), "of the choice that met the other worker's failure, too"


async def test_only_choices_that_have_not_ended_go_on() -> None:
    async with running(decode=2) as rig:
        whole = expected(rig, 20)
        stop = whole[0][2:4]
        for worker in rig.cluster.decode:
            worker.script.fail("decode 9", ComputeFailed("mid-way"))
            worker.script.slow("decode", seconds=0.01)  # the router has read what came before
        answer = await rig.collect(several(stopping=RawStopping(max_tokens=20, stop=(stop,))))
        assert texts(answer) == [text.split(stop)[0] for text in whole]
        resumed = [spec.sampling.choice_index for spec in rig.cluster.prefill[0].specs if spec.resumed_token_ids]
        assert 0 not in resumed
        assert {1, 2} <= set(resumed)


async def test_a_decode_worker_is_killed_under_several_choices() -> None:
    async with running(decode=2) as rig:
        for worker in rig.cluster.decode:
            worker.script.stall("decode 5")
        call = asyncio.create_task(rig.collect(several(12)))
        victim = await _first_at(rig, "decode 5")
        for worker in rig.cluster.decode:
            if worker is not victim:
                worker.script = Script()
        await victim.kill()
        assert texts(await call) == expected(rig, 12)


async def _first_at(rig: Rig, phase: str) -> FakeDecode:
    workers = rig.cluster.decode
    await until(lambda: any(worker.script.reached(phase).is_set() for worker in workers), what=phase)
    return next(worker for worker in workers if worker.script.reached(phase).is_set())


async def test_a_stream_that_cannot_be_continued_says_how_much_was_sent_of_all_choices() -> None:
    async with running() as rig:
        decode = rig.cluster.decode[0]
        decode.script.stall("decode 3")
        received: list[Event] = []

        async def read() -> None:
            async with rig.generation.open(several(), timeout_s=10, is_streamed=True) as call:
                async for event in call.outbox.events():
                    received.append(event)  # noqa: PERF401 - looked at as they come

        reading = asyncio.create_task(read())
        await decode.script.reached("decode 3").wait()
        await until(lambda: len(Answer(received).token_ids) == 3 * N, what="the client has three tokens of each")
        await decode.kill()
        with pytest.raises(StreamBroken) as caught:
            await reading
        assert caught.value.tokens_sent == 3 * N


async def test_tokens_of_the_others_count_until_the_last_of_them_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of a batch fails; before the other one is told to end, more of its tokens are sent."""
    end = together._end
    async with running() as rig:
        rig.cluster.decode[0].script.stall("decode 3")
        go_on = rig.cluster.prefill[0].script.stall("first_token", then=ComputeFailed("no"))
        async with rig.generation.open(batch("one", "two"), timeout_s=10, is_streamed=True) as call:

            async def end_late(tasks: Sequence[asyncio.Task[Any]]) -> None:
                call.outbox.put(DeltaEvent(index=1, text="late", tokens=(ProducedToken(token_id=1),) * 2))
                await end(tasks)

            monkeypatch.setattr(together, "_end", end_late)
            received: list[Event] = []

            async def read() -> None:
                async for event in call.outbox.events():
                    received.append(event)
                    if len(Answer(received).token_ids) >= 2:
                        rig.cluster.prefill[0].script.fail("first_token", ComputeFailed("no"), times=2)
                        go_on.set()

            with pytest.raises(StreamBroken) as caught:
                await read()
            assert caught.value.tokens_sent == len(Answer(received).token_ids)
            assert f"after {caught.value.tokens_sent} tokens" in str(caught.value)


async def test_an_error_that_no_retry_can_cure_ends_all_choices() -> None:
    async with running() as rig:
        rig.cluster.decode[0].script.fail("decode 3", InternalError("a bug"))
        with pytest.raises(InternalError, match="a bug"):
            await rig.collect(several())


async def test_choices_that_kill_their_workers_are_poison() -> None:
    policy = FailoverPolicy(max_attempts=5, worker_wait_s=5.0, resume_wait_s=5.0)
    async with running(decode=2, policy=policy) as rig:

        async def kill_at(worker: FakeDecode) -> None:
            while True:
                worker.script.stall("decode")
                await worker.script.reached("decode").wait()
                await worker.restart()
                worker.script = Script()

        killers = [asyncio.create_task(kill_at(worker)) for worker in rig.cluster.decode]
        try:
            with pytest.raises(PoisonedRequest):
                await rig.collect(several())
        finally:
            for killer in killers:
                killer.cancel()
            await asyncio.gather(*killers, return_exceptions=True)


# --- early ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reserve", "first_token", "hand_over", "decode 3"])
async def test_cancellation_frees_both_workers_in_every_phase(phase: str) -> None:
    async with running() as rig:
        worker = rig.cluster.prefill[0] if phase in {"first_token", "hand_over"} else rig.cluster.decode[0]
        worker.script.stall(phase)
        call = asyncio.create_task(rig.collect(several()))
        await worker.script.reached(phase).wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await rig.cluster.assert_idle()


@pytest.mark.parametrize("how", ["time limit", "operator", "deadline", "cancel"])
async def test_choices_that_go_on_apart_end_together(how: str) -> None:
    """The failure comes after three tokens, and then nothing goes on."""
    async with running() as rig:
        decode = rig.cluster.decode[0]
        decode.script.fail("decode 3", ComputeFailed("mid-way"))
        rig.cluster.prefill[0].script.stall("hand_over").set()  # the first one, of all together
        for _ in range(N):
            rig.cluster.prefill[0].script.stall("hand_over")
        limit_s = 0.6 if how == "time limit" else None
        raw = several(request_id="mine", stopping=RawStopping(max_tokens=20, time_limit_s=limit_s))
        call = asyncio.create_task(rig.collect(raw, timeout_s=0.8 if how == "deadline" else 20.0))
        await until(lambda: len(rig.cluster.prefill[0].running) == N, what="each is computed again")
        if how == "operator":
            rig.live.abort("mine")
        if how == "cancel":
            call.cancel()
        if how in {"time limit", "operator"}:
            answer = await call
            for text, whole in zip(texts(answer), expected(rig, 20), strict=True):
                assert whole.startswith(text)
                assert len(text) >= 2, "one of all together, and one of its own"
            reason = FinishReason.TIME_LIMIT if how == "time limit" else FinishReason.CANCELLED
            assert {answer.finish_of(index).reason for index in range(N)} == {reason}
        else:
            with pytest.raises(DeadlineExceeded if how == "deadline" else asyncio.CancelledError):
                await call
        await rig.cluster.assert_idle()


# --- batches --------------------------------------------------------------------------------------

PROMPTS = ("hello", "a longer prompt", "third")


def batch(*prompts: str, n: int | None = None, seed: int | None = 7, **changes: object) -> RawGenerationRequest:
    entries = tuple(TextPrompt(text=prompt) for prompt in prompts)
    return request(6, prompt=BatchPrompt(prompts=entries), sampling=RawSampling(seed=seed, n=n), **changes)


async def test_a_batch_is_answered_in_the_order_of_its_prompts() -> None:
    async with running(prefill=2, decode=2) as rig:
        answer = await rig.collect(batch(*PROMPTS, n=2))
        assert texts(answer, 6) == [
            expected_text(rig.cluster, 6, prompt=prompt, choice=choice) for prompt in PROMPTS for choice in range(2)
        ]
        num_prompt_tokens = sum(map(len, PROMPTS))
        usage = answer.summary.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, 6 * 6)
        opening = answer.events[0]
        assert isinstance(opening, PromptEvent)
        assert opening.prompt_tokens == num_prompt_tokens
        assert sum(isinstance(event, PromptEvent) for event in answer.events) == 1
        assert sum(isinstance(event, FinishEvent) for event in answer.events) == 6
        assert answer.summary.placement.kv_bytes == BLOCK_BYTES * (2 + 4 + 2)


async def test_equal_prompts_draw_alike_with_a_seed_and_differ_without() -> None:
    async with running() as rig:
        assert len(set(texts(await rig.collect(batch("x", "x", "x")), 3))) == 1
        assert len(set(texts(await rig.collect(batch("x", "x", "x", seed=None)), 3))) == 3


async def test_a_prompt_that_fails_fails_the_batch_and_frees_all() -> None:
    async with running() as rig:
        rig.cluster.decode[0].script.fail("decode 3", InternalError("a bug"))
        with pytest.raises(InternalError, match="a bug"):
            await rig.collect(batch(*PROMPTS))
        await rig.cluster.assert_idle()


async def test_a_prompt_that_fails_before_its_tokens_breaks_a_stream_that_has_others() -> None:
    async with running() as rig:
        prefill = rig.cluster.prefill[0]
        go_on = prefill.script.stall("first_token", then=ComputeFailed("no"))
        call = asyncio.create_task(rig.collect(batch("one", "two")))
        await until(lambda: len(prefill.specs) == 2 and len(prefill.running) == 1, what="one is done, the other waits")
        await asyncio.sleep(0.2)  # the router has read all of the one
        prefill.script.fail("first_token", ComputeFailed("no"), times=2)
        go_on.set()
        with pytest.raises(StreamBroken) as caught:
            await call
        assert caught.value.tokens_sent == 6


async def test_a_large_batch_is_computed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.MAX_PROMPTS_AT_ONCE", 2)
    async with running() as rig:
        prefill = rig.cluster.prefill[0]
        most = 0
        prefill.script.slow("first_token", seconds=0.02)
        call = asyncio.create_task(rig.collect(batch(*(f"prompt {index}" for index in range(7)))))
        while not call.done():
            most = max(most, len(prefill.running | prefill.waiting))
            await asyncio.sleep(0.002)
        assert texts(await call, 7) == [expected_text(rig.cluster, 6, prompt=f"prompt {index}") for index in range(7)]
        assert most == 2


async def test_every_prompt_that_is_too_long_is_named_and_nothing_is_computed() -> None:
    async with running() as rig:
        with pytest.raises(InvalidRequest) as caught:
            await rig.collect(batch("fits", "x" * 60, "fits", "y" * 5000))
        named = {violation.field: violation.description for violation in caught.value.violations}
        assert list(named) == ["batch.prompts[3].prompt"], "before anything is tokenized"
        assert "prompt 3 has 5000 characters" in named["batch.prompts[3].prompt"]
        with pytest.raises(InvalidRequest) as caught:
            await rig.collect(batch("fits", "x" * 60, "fits", "y" * 64))
        named = {violation.field: violation.description for violation in caught.value.violations}
        assert list(named) == ["batch.prompts[1].prompt", "batch.prompts[3].prompt"]
        assert "prompt 1 has 60 tokens" in named["batch.prompts[1].prompt"]
        assert "limit of 64" in named["batch.prompts[1].prompt"]
        assert not rig.cluster.prefill[0].specs


async def test_an_operator_ends_a_whole_batch() -> None:
    async with running() as rig:
        for _ in PROMPTS:
            rig.cluster.decode[0].script.stall("decode 3")
        call = asyncio.create_task(rig.collect(batch(*PROMPTS, request_id="mine")))
        await until(lambda: len(rig.cluster.decode[0].reservations) == 3, what="all are reserved")
        await rig.cluster.decode[0].script.reached("decode 3").wait()
        rig.live.abort("mine")
        started_s = time.monotonic()
        answer = await call
        assert time.monotonic() - started_s < 5
        assert {answer.finish_of(index).reason for index in range(3)} == {FinishReason.CANCELLED}
