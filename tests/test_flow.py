"""The flow of a request, against workers over real gRPC: its ways, its failures, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from fake_workers import BLOCK_BYTES, MAX_MODEL_LEN, make_model, until
from flow_rig import Answer, expected_text, request, running
from router.admission import Admission
from router.outbox import DeltaEvent, Event, FinishEvent, PromptEvent, SummaryEvent
from router.placement import WorkerKey
from router.worker_entry import WorkerLife
from twinstage.errors import (
    AlreadyExists,
    Cancelled,
    ComputeFailed,
    DeadlineExceeded,
    InternalError,
    KvExhausted,
    NoWorker,
    StreamBroken,
    TransferError,
    TwinstageError,
    Unavailable,
    WorkerLost,
)
from twinstage.types import (
    FinishReason,
    RawGenerationRequest,
    RawOutput,
    RawSampling,
    RawStopping,
    TokenPrompt,
)

# --- the ways of a request ------------------------------------------------------------------------


async def test_request_crosses_both_workers() -> None:
    async with running() as rig:
        answer = await rig.collect(request(8))
        assert answer.text == expected_text(rig.cluster, 8)
        assert isinstance(answer.events[0], PromptEvent)
        assert answer.events[0].prompt_tokens == 5
        assert answer.finish.finish.reason is FinishReason.LENGTH
        summary = answer.summary
        assert (summary.usage.prompt_tokens, summary.usage.completion_tokens) == (5, 8)
        placement = summary.placement
        assert (placement.prefill_worker, placement.decode_worker) == ("prefill-0", "decode-0")
        assert (placement.transport, placement.kv_bytes) == ("shm", 2 * BLOCK_BYTES)
        assert (placement.retries, placement.decode_computed_prompt_tokens) == (0, 0)
        timing = summary.timing
        assert timing.queue_s == pytest.approx(0.001 + 0.004 + 0.005, abs=1e-3)
        assert (timing.prefill_s, timing.kv_transfer_s, timing.decode_s) == (0.002, 0.003, 0.006)
        assert 0 < timing.time_to_first_token_s <= timing.total_s


async def test_a_prompt_that_begins_like_an_earlier_one_goes_to_the_workers_that_had_it() -> None:
    async with running(prefill=2, decode=2, model=make_model(max_model_len=512), total_blocks=4096) as rig:

        async def placed(*token_ids: int) -> tuple[str, str]:
            answer = await rig.collect(request(3, prompt=TokenPrompt(token_ids=token_ids)))
            placement = answer.summary.placement
            return placement.prefill_worker, placement.decode_worker

        beginning = [3 + index % 5 for index in range(200)]
        first = await placed(*beginning)
        for last in range(3, 7):
            assert await placed(*beginning, last) == first
        others = [await placed(*[3 + (index + shift) % 7 for index in range(200)]) for shift in (1, 2)]
        assert len({*others, first}) == 2, "others still take turns"
        rig.workers.prefixes.clear()
        again = [await placed(*beginning) for _ in range(2)]
        assert again[0] == again[1]


async def test_blocks_that_requests_share_do_not_fill_a_decode_worker_in_the_routers_books() -> None:
    async with running(model=make_model(max_model_len=512), total_blocks=40) as rig:
        worker = rig.cluster.decode[0]
        worker.shared_blocks = 9
        gates = [worker.script.stall("decode 2") for _ in range(4)]
        prompt = TokenPrompt(token_ids=tuple(3 + index % 5 for index in range(40)))  # 10 blocks
        calls = [asyncio.create_task(rig.collect(request(4, prompt=prompt))) for _ in range(4)]
        (life,) = rig.workers.models["fake"].decode
        await until(lambda: len(worker.reservations) == 4, what="four reservations")
        await until(lambda: life.candidate().free_blocks == 40 - 4 == worker.free_blocks, what="one block for each")
        for gate in gates:
            gate.set()
        await asyncio.gather(*calls)


async def test_grant_gets_the_host_at_which_the_router_reaches_the_decode_worker() -> None:
    async with running() as rig:
        await rig.collect(request(2))
        grant = rig.cluster.prefill[0].grants[0]
        assert grant is not None
        assert [endpoint.address for endpoint in grant.endpoints] == ["/run/kv.sock", "127.0.0.1:7000"]


async def test_request_that_the_router_itself_cancels_does_not_leave_its_client_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cancelled(*_: object, **__: object) -> None:
        raise asyncio.CancelledError  # as from an executor that was shut down

    async with running() as rig:
        monkeypatch.setattr(Admission, "admit", cancelled)
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="try again"):
                await rig.collect(request(4))


async def test_worker_that_was_lost_a_moment_ago_is_blamed_and_another_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(prefill=2) as rig:
        real, lost = rig.workers.life, set[WorkerKey]()

        def life(key: WorkerKey) -> WorkerLife:
            if not lost or key in lost:
                lost.add(key)
                raise WorkerLost(f"worker {key.worker_id} is lost")
            return real(key)

        monkeypatch.setattr(rig.workers, "life", life)
        answer = await rig.collect(request(4))
        assert answer.text == expected_text(rig.cluster, 4)
        assert answer.summary.placement.retries == 1


async def test_decode_worker_whose_session_ends_in_the_moment_of_placement_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(decode=2) as rig:
        real, ended = rig.workers.life, list[WorkerKey]()

        def life(key: WorkerKey) -> WorkerLife:
            found = real(key)
            if found.session is not None and not ended:
                ended.append(key)
                found.session.close()
            return found

        monkeypatch.setattr(rig.workers, "life", life)
        answer = await rig.collect(request(4))
        assert answer.text == expected_text(rig.cluster, 4)
        assert answer.summary.placement.retries == 1
        assert answer.summary.placement.decode_worker != ended[0].worker_id


async def test_one_token_needs_no_decode_worker() -> None:
    async with running() as rig:
        answer = await rig.collect(request(1))
        assert answer.text == expected_text(rig.cluster, 1)
        assert answer.summary.placement.decode_worker == ""
        assert rig.cluster.prefill[0].grants == [None]
        assert not rig.cluster.decode[0].script.reached("reserve").is_set()


async def test_prefill_waits_for_the_grant_and_is_given_up_with_it() -> None:
    async with running() as rig:
        prefill, decode = rig.cluster.prefill[0], rig.cluster.decode[0]
        grant_it = decode.script.stall("reserve")
        call = asyncio.create_task(rig.collect(request(8)))
        await until(lambda: prefill.waiting, what="the prefill worker has the prompt")
        assert decode.script.reached("reserve").is_set()
        await asyncio.sleep(0.05)
        assert not prefill.script.reached("first_token").is_set()
        grant_it.set()
        assert (await call).text == expected_text(rig.cluster, 8)
        decode.script.stall("reserve")
        call = asyncio.create_task(rig.collect(request(8)))
        await until(lambda: prefill.waiting, what="the prefill worker has the next prompt")
        call.cancel()
        await rig.cluster.assert_idle()
        assert len(prefill.specs) == 1


async def test_prefill_worker_that_dies_while_decode_reserves_is_replaced() -> None:
    async with running(prefill=2) as rig:
        decode = rig.cluster.decode[0]
        grant_it = decode.script.stall("reserve")
        call = asyncio.create_task(rig.collect(request(8)))
        await until(lambda: any(worker.waiting for worker in rig.cluster.prefill), what="one has the prompt")
        victim = next(worker for worker in rig.cluster.prefill if worker.waiting)
        await victim.kill()
        grant_it.set()
        answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1
        await rig.cluster.assert_idle()


async def test_first_token_that_ends_the_request_gives_the_reservation_back() -> None:
    async with running() as rig:
        first = (await rig.collect(request(1))).token_ids[0]
        stopping = RawStopping(max_tokens=8, stop_token_ids=(first,))
        answer = await rig.collect(request(stopping=stopping))
        assert answer.finish.finish.matched_token_id == first
        assert answer.summary.placement.decode_worker == ""
        assert answer.summary.placement.kv_bytes == 0
        await rig.cluster.assert_idle()
        assert len(rig.cluster.decode[0].aborted) == 1


async def test_end_of_the_transfer_may_be_heard_of_before_the_first_token_that_ended_it() -> None:
    async with running() as rig:
        first = (await rig.collect(request(1))).token_ids[0]
        decode, script = rig.cluster.decode[0], rig.cluster.prefill[0].script
        script.reached("first_token").clear()
        go_on = script.stall("first_token")
        stopping = RawStopping(max_tokens=8, stop_token_ids=(first,))
        call = asyncio.create_task(rig.collect(request(stopping=stopping)))
        await script.reached("first_token").wait()
        decode.fail(next(iter(decode.reservations)), TransferError("the sender aborted the transfer"))
        await asyncio.sleep(0.2)  # the router hears of it
        go_on.set()
        answer = await call
        assert answer.finish.finish.matched_token_id == first
        assert answer.summary.placement.retries == 0
        await rig.cluster.assert_idle()


async def test_transfer_that_failed_without_a_word_of_the_sender_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.attempt.SENDERS_WORD_S", 0.1)
    async with running() as rig:
        decode, script = rig.cluster.decode[0], rig.cluster.prefill[0].script
        script.stall("first_token")  # of the first attempt alone
        call = asyncio.create_task(rig.collect(request(8)))
        await script.reached("first_token").wait()
        decode.fail(next(iter(decode.reservations)), TransferError("the sender aborted the transfer"))
        answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1


async def test_stop_string_ends_the_request_on_the_worker() -> None:
    async with running() as rig:
        whole = expected_text(rig.cluster, 30)
        stop = whole[3:6]
        stopping = RawStopping(max_tokens=30, stop=(stop,))
        rig.cluster.decode[0].script.stall("decode 10")
        answer = await rig.collect(request(stopping=stopping))
        assert answer.text == whole[: whole.index(stop)]
        assert answer.finish.finish.matched_text == stop
        assert answer.summary.usage.completion_tokens == whole.index(stop) + 3
        assert answer.summary.placement.kv_bytes == 2 * BLOCK_BYTES
        await rig.cluster.assert_idle()
        assert len(rig.cluster.decode[0].aborted) == 1


async def test_chat_goes_on_to_the_context_limit() -> None:
    from twinstage.types import ChatMessage, ChatPrompt

    async with running() as rig:
        prompt = ChatPrompt(messages=(ChatMessage(role="user", content="hi"),))
        answer = await rig.collect(RawGenerationRequest(prompt=prompt, sampling=RawSampling(seed=7)))
        assert answer.finish.finish.reason is FinishReason.CONTEXT_LIMIT
        usage = answer.summary.usage
        assert usage.prompt_tokens == len("user:hi;")
        assert usage.prompt_tokens + usage.completion_tokens == MAX_MODEL_LEN


async def test_first_token_is_sent_before_the_hand_over() -> None:
    async with running() as rig:
        go_on = rig.cluster.prefill[0].script.stall("hand_over")
        async with rig.generation.open(request(4), timeout_s=10, is_streamed=True) as call:
            events = call.outbox.events()
            assert isinstance(await anext(events), PromptEvent)
            first = await anext(events)
            assert isinstance(first, DeltaEvent)
            assert len(first.tokens) == 1
            go_on.set()
            assert isinstance([event async for event in events][-1], SummaryEvent)


async def test_slow_client_gets_fewer_and_longer_deltas() -> None:
    async with running() as rig:
        async with rig.generation.open(request(40), timeout_s=10, is_streamed=True) as call:
            events = call.outbox.events()
            assert isinstance(await anext(events), PromptEvent)
            await rig.cluster.assert_idle()
            await until(lambda: call.outbox.is_closed, what="the flow has ended")
            rest = [event async for event in events]
        deltas = [event for event in rest if isinstance(event, DeltaEvent)]
        assert len(deltas) <= 2
        assert sum(len(delta.tokens) for delta in deltas) == 40


async def test_many_requests_use_every_worker() -> None:
    async with running(prefill=2, decode=3) as rig:
        answers = await asyncio.gather(*(rig.collect(request(6)) for _ in range(24)))
        assert {answer.text for answer in answers} == {expected_text(rig.cluster, 6)}
        assert all(worker.served for worker in rig.cluster.workers)


async def test_idle_workers_take_turns() -> None:
    async with running(prefill=2, decode=2) as rig:
        for _ in range(4):
            await rig.collect(request(3))
        assert [worker.served for worker in rig.cluster.workers] == [2, 2, 2, 2]


# --- failures before the first token --------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("first_token", ComputeFailed("out of luck")),
        ("first_token", WorkerLost("gone")),
        ("hand_over", TransferError("checksum")),
    ],
)
async def test_failure_on_prefill_is_retried_elsewhere(phase: str, error: TwinstageError) -> None:
    async with running(prefill=2) as rig:
        for worker in rig.cluster.prefill:
            worker.script.fail(phase, error)
        rig.cluster.prefill[1].script = type(rig.cluster.prefill[1].script)()
        for _ in range(2):  # one of the two goes to the worker that fails
            answer = await rig.collect(request(8))
            assert answer.text == expected_text(rig.cluster, 8)
        assert rig.cluster.prefill[0].specs


async def test_failed_reservation_is_retried_on_another_decode_worker() -> None:
    async with running(decode=2) as rig:
        rig.cluster.decode[0].script.fail("reserve", KvExhausted("full"), times=9)
        for _ in range(3):
            answer = await rig.collect(request(8))
            assert answer.summary.placement.decode_worker == "decode-1"


async def test_retries_are_bounded_and_the_last_error_is_told() -> None:
    async with running() as rig:
        rig.cluster.prefill[0].script.fail("first_token", ComputeFailed("always"), times=9)
        with pytest.raises(ComputeFailed, match="always"):
            await rig.collect(request(8))
        assert len(rig.cluster.prefill[0].specs) == 3


async def test_error_that_no_retry_can_cure_is_told_at_once() -> None:
    async with running(prefill=2) as rig:
        for worker in rig.cluster.prefill:
            worker.script.fail("first_token", InternalError("a bug"))
        with pytest.raises(InternalError, match="a bug"):
            await rig.collect(request(8))
        assert sum(len(worker.specs) for worker in rig.cluster.prefill) == 1


async def test_only_prefill_worker_killed_gives_unavailable_within_two_seconds() -> None:
    async with running() as rig:
        worker = rig.cluster.prefill[0]
        worker.script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        await worker.script.reached("first_token").wait()
        started = time.monotonic()
        await worker.kill()
        with pytest.raises(Unavailable):
            await call
        assert time.monotonic() - started < 2
        worker.running.clear()
        with pytest.raises(NoWorker):
            await rig.collect(request(8))


async def test_prefill_worker_killed_while_another_lives_goes_unnoticed() -> None:
    async with running(prefill=2) as rig:
        for worker in rig.cluster.prefill:
            worker.script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        waits = [asyncio.create_task(worker.script.reached("first_token").wait()) for worker in rig.cluster.prefill]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        victim = next(worker for worker in rig.cluster.prefill if worker.script.reached("first_token").is_set())
        other = next(worker for worker in rig.cluster.prefill if worker is not victim)
        other.script = type(other.script)()
        await victim.kill()
        answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1
        for wait in waits:
            wait.cancel()


async def test_silent_worker_is_lost_although_its_connection_stands() -> None:
    async with running(prefill=1) as rig:
        worker = rig.cluster.prefill[0]
        worker.script.stall("first_token")
        worker.script.stall("load")
        answer = await rig.collect(request(8))
        assert answer.summary.placement.retries == 1, "the first attempt would have waited for ever"


async def test_decode_worker_killed_while_prefill_computes_is_replaced_at_once() -> None:
    async with running(decode=2) as rig:
        script = rig.cluster.prefill[0].script
        script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        await script.reached("first_token").wait()
        victim = next(worker for worker in rig.cluster.decode if worker.reservations)
        await victim.kill()
        answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1


# --- failures after the first token ---------------------------------------------------------------


async def test_replay_continues_with_the_same_tokens() -> None:
    async with running(prefill=2, decode=2) as rig:
        for worker in rig.cluster.decode:
            worker.script.fail("decode 5", ComputeFailed("mid-way"))
        rig.cluster.decode[1].script = type(rig.cluster.decode[1].script)()
        script = rig.cluster.decode[0].script
        go_on = script.stall("decode 4")  # until the router has read what came before, the hand-over included

        async def let_it_fail() -> None:
            await script.reached("decode 4").wait()
            await asyncio.sleep(0.2)
            go_on.set()

        failing = asyncio.create_task(let_it_fail())
        answers = [await rig.collect(request(12)) for _ in range(2)]
        await failing
        assert [answer.text for answer in answers] == [expected_text(rig.cluster, 12)] * 2
        assert sorted(answer.summary.placement.retries for answer in answers) == [0, 1]
        resumed = [spec for worker in rig.cluster.prefill for spec in worker.specs if spec.resumed_token_ids]
        assert [len(spec.resumed_token_ids) for spec in resumed] == [5]
        assert all(answer.summary.usage.completion_tokens == 12 for answer in answers)


async def test_decode_worker_killed_while_decoding_is_replaced() -> None:
    async with running(decode=2) as rig:
        for worker in rig.cluster.decode:
            worker.script.stall("decode 5")
        call = asyncio.create_task(rig.collect(request(12)))
        waits = [asyncio.create_task(worker.script.reached("decode 5").wait()) for worker in rig.cluster.decode]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        victim = next(worker for worker in rig.cluster.decode if worker.script.reached("decode 5").is_set())
        for worker in rig.cluster.decode:
            if worker is not victim:
                worker.script = type(worker.script)()
        await victim.kill()
        assert (await call).text == expected_text(rig.cluster, 12)
        for wait in waits:
            wait.cancel()


async def test_last_token_of_a_replay_needs_no_decode_worker() -> None:
    async with running(prefill=1, decode=1) as rig:
        rig.cluster.decode[0].script.fail("decode 7", ComputeFailed("late"))
        answer = await rig.collect(request(8))
        assert answer.text == expected_text(rig.cluster, 8)
        assert rig.cluster.prefill[0].grants[-1] is None


def num_tokens(event: Event) -> int:
    return len(event.tokens) if isinstance(event, DeltaEvent) else 0


async def test_stream_that_cannot_be_continued_says_how_much_was_sent() -> None:
    async with running() as rig:
        decode = rig.cluster.decode[0]
        decode.script.stall("decode 3")
        received: list[Event] = []

        async def read() -> None:
            async with rig.generation.open(request(8), timeout_s=10, is_streamed=True) as call:
                async for event in call.outbox.events():
                    received.append(event)  # noqa: PERF401 - looked at as they come

        reading = asyncio.create_task(read())
        await decode.script.reached("decode 3").wait()
        await until(lambda: sum(num_tokens(event) for event in received) == 3, what="the client has three tokens")
        await decode.kill()
        with pytest.raises(StreamBroken) as caught:
            await reading
        assert caught.value.tokens_sent == 3


async def test_unary_call_that_cannot_be_continued_gets_the_worker_s_error() -> None:
    async with running() as rig:
        decode = rig.cluster.decode[0]
        decode.script.stall("decode 3")
        call = asyncio.create_task(rig.collect(request(8), is_streamed=False))
        await decode.script.reached("decode 3").wait()
        await decode.kill()
        with pytest.raises(WorkerLost):
            await call


# --- early ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["reserve", "first_token", "hand_over", "decode 3"])
async def test_cancellation_frees_both_workers_in_every_phase(phase: str) -> None:
    async with running() as rig:
        worker = rig.cluster.prefill[0] if phase in {"first_token", "hand_over"} else rig.cluster.decode[0]
        worker.script.stall(phase)
        call = asyncio.create_task(rig.collect(request(8)))
        await worker.script.reached(phase).wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await rig.cluster.assert_idle()
        assert (await rig.collect(request(8))).text == expected_text(rig.cluster, 8)


@pytest.mark.parametrize("phase", ["reserve", "first_token", "hand_over", "decode 3"])
async def test_deadline_holds_in_every_phase(phase: str) -> None:
    async with running() as rig:
        worker = rig.cluster.prefill[0] if phase in {"first_token", "hand_over"} else rig.cluster.decode[0]
        worker.script.stall(phase)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await rig.collect(request(8), timeout_s=0.4)
        assert 0.35 < time.monotonic() - started < 1.5
        await rig.cluster.assert_idle()


async def test_time_limit_returns_what_there_is() -> None:
    async with running() as rig:
        rig.cluster.decode[0].script.stall("decode 4")
        answer = await rig.collect(request(stopping=RawStopping(max_tokens=20, time_limit_s=0.4)))
        assert answer.finish.finish.reason is FinishReason.TIME_LIMIT
        assert answer.text == expected_text(rig.cluster, 4)
        assert answer.summary.usage.completion_tokens == 4


async def test_time_limit_before_the_first_token_gives_an_empty_answer() -> None:
    async with running() as rig:
        rig.cluster.prefill[0].script.stall("first_token")
        answer = await rig.collect(request(stopping=RawStopping(max_tokens=20, time_limit_s=0.2)))
        assert [type(event) for event in answer.events] == [PromptEvent, FinishEvent, SummaryEvent]
        assert answer.finish.finish.reason is FinishReason.TIME_LIMIT


async def test_operator_ends_a_request() -> None:
    async with running() as rig:
        rig.cluster.decode[0].script.stall("decode 4")
        events: list[Event] = []
        async with rig.generation.open(request(20, request_id="mine"), timeout_s=10, is_streamed=True) as call:
            async for event in call.outbox.events():
                events.append(event)
                if len(Answer(events).token_ids) == 4 and isinstance(event, DeltaEvent):
                    with pytest.raises(AlreadyExists):
                        await rig.collect(request(2, request_id="mine"))
                    rig.live.abort("mine")
        answer = Answer(events)
        assert answer.finish.finish.reason is FinishReason.CANCELLED
        assert answer.text == expected_text(rig.cluster, 4)


async def test_operator_ends_a_request_that_waits_for_admission() -> None:
    async with running(max_live=1) as rig:
        rig.cluster.prefill[0].script.stall("first_token")
        first = asyncio.create_task(rig.collect(request(2)))
        await rig.cluster.prefill[0].script.reached("first_token").wait()
        second = asyncio.create_task(rig.collect(request(2, request_id="waiting")))
        await until(lambda: "waiting" in rig.live, what="the second request waits")
        rig.live.abort("waiting")
        with pytest.raises(Cancelled):
            await second
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_logprobs_come_with_every_token() -> None:
    async with running() as rig:
        answer = await rig.collect(request(6, output=RawOutput(logprobs=0)))
        deltas = [event for event in answer.events if isinstance(event, DeltaEvent)]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert len(tokens) == 6
        assert all(token.logprobs is not None for token in tokens)


async def test_prompt_larger_than_every_pool_is_refused() -> None:
    async with running(total_blocks=1) as rig:
        with pytest.raises(KvExhausted):
            await rig.collect(request(8))
        assert (await rig.collect(request(1))).text == expected_text(rig.cluster, 1)
