"""Several choices on a decode worker: one reservation, one hand-over, and ends of their own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from decode_bench import BLOCK_SIZE, NUM_BLOCKS, Bench, make_spec, open_bench
from decode_worker.sessions import Session, SessionFailure, SessionStep
from twinstage.errors import KvExhausted, StaleHandle, TransferError
from twinstage.transfer.values import HandoverCommit, ReceivedBlocks
from twinstage.types import FinishReason, KvGrant, RequestId, SequenceSpec
from worker_parts import continuation

R = RequestId("r")
FIRSTS = {0: 11, 1: 22, 2: 33}


def spec_of(length: int = 10, max_tokens: int = 6, n: int = 3) -> SequenceSpec:
    return replace(make_spec(length, max_tokens=max_tokens), num_choices=n)


async def commit(bench: Bench, grant: KvGrant, spec: SequenceSpec, firsts: dict[int, int]) -> None:
    message = HandoverCommit(
        request_id=spec.request_id, num_tokens=len(spec.prompt_token_ids), first_tokens=tuple(firsts.items())
    )
    received = ReceivedBlocks(kv_bytes=1000, num_blocks=len(grant.block_ids), transport="tcp")
    if grant.transfer_id not in bench.receiver.opened:
        await bench.open(grant)
    await asyncio.to_thread(bench.receiver.delegate.committed, grant.transfer_id, message, received)


async def collect(session: Session) -> tuple[dict[int, list[int]], list[SessionStep]]:
    """The tokens of each choice until the totals come, and the steps."""
    tokens: dict[int, list[int]] = {}
    steps: list[SessionStep] = []
    async with asyncio.timeout(10):
        async for message in session.messages():
            assert isinstance(message, SessionStep), message
            steps.append(message)
            for chunk in message.chunks:
                assert chunk.request_id == R
                tokens.setdefault(chunk.choice_index, []).extend(token.token_id for token in chunk.tokens)
            if message.totals:
                return tokens, steps
    raise AssertionError("the session ended before the request")


def expected(spec: SequenceSpec, first: int) -> list[int]:
    return continuation([*spec.prompt_token_ids, first], spec.max_tokens - 1)


@pytest.mark.parametrize(("length", "reserved"), [(8, 2), (10, 3 + 2)])
async def test_choices_share_the_prompt_and_one_reservation_holds_all(length: int, reserved: int) -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(length)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        assert len(grant.block_ids) == -(-length // BLOCK_SIZE), "what crosses is the prompt's alone"
        assert await bench.free_blocks() == NUM_BLOCKS - reserved
        await commit(bench, grant, spec, FIRSTS)
        tokens, steps = await collect(session)
        assert tokens == {index: expected(spec, first) for index, first in FIRSTS.items()}
        ends = [chunk.finish for step in steps for chunk in step.chunks if chunk.finish is not None]
        assert [finish.reason for finish in ends] == [FinishReason.LENGTH] * 3
        (totals,) = (totals for step in steps for totals in step.totals)
        assert (totals.request_id, totals.kv_bytes_received, totals.computed_prompt_tokens) == (R, 1000, 0)
        await bench.all_blocks_free()
        assert (await bench.load()).finished == 1


async def test_choices_that_ended_with_their_first_token_do_not_begin() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of()
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await commit(bench, grant, spec, {1: 22})
        tokens, _ = await collect(session)
        assert tokens == {1: expected(spec, 22)}
        await bench.all_blocks_free()


@pytest.mark.parametrize("when", ["before the commit", "after it"])
@pytest.mark.parametrize("victim", [0, 2])
async def test_one_choice_is_ended_and_the_others_go_on(when: str, victim: int) -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(max_tokens=40)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        if when == "before the commit":
            bench.worker.abort(session, R, victim)
            await commit(bench, grant, spec, FIRSTS)
        else:
            bench.runner.close_gate()
            await commit(bench, grant, spec, FIRSTS)
            await asyncio.to_thread(bench.runner.entered.wait, 5)
            bench.worker.abort(session, R, victim)
            assert (await bench.load()).leaked_kv_blocks == 0
            bench.runner.open_gate()
        tokens, steps = await collect(session)
        others = {index: expected(spec, first) for index, first in FIRSTS.items() if index != victim}
        assert {index: got for index, got in tokens.items() if index != victim} == others
        assert victim not in tokens, "what was computed meanwhile is not told"
        assert sum(len(step.totals) for step in steps) == 1
        bench.worker.abort(session, R, 1)  # it has ended
        await bench.all_blocks_free()


async def test_when_the_last_choice_is_ended_so_is_the_request() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(max_tokens=40)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.runner.close_gate()
        await commit(bench, grant, spec, FIRSTS)
        await asyncio.to_thread(bench.runner.entered.wait, 5)
        for index in FIRSTS:
            bench.worker.abort(session, R, index)
        assert not bench.worker._requests.live()
        bench.runner.open_gate()
        await bench.all_blocks_free()


async def test_a_commit_of_nothing_that_goes_on_fails_the_request() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(n=2)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.worker.abort(session, R, 1)
        with pytest.raises(StaleHandle):
            await commit(bench, grant, spec, {1: 22})
        await bench.all_blocks_free()


async def test_a_commit_of_choices_that_were_not_asked_for_is_refused() -> None:
    async with open_bench() as bench:
        bench.worker.open_session("s")
        spec = spec_of(n=2)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        with pytest.raises(TransferError, match="2 of them"):
            await commit(bench, grant, spec, FIRSTS)
        await bench.all_blocks_free()


async def test_a_choice_that_fails_fails_the_request_and_frees_the_others() -> None:
    async with open_bench() as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(max_tokens=40)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        bench.runner.fail_next()
        await commit(bench, grant, spec, FIRSTS)
        failures = []
        async with asyncio.timeout(10):
            async for message in session.messages():
                if isinstance(message, SessionFailure):
                    failures.append(message)
                    break
        await bench.all_blocks_free()
        assert [failure.request_id for failure in failures] == [R]


async def test_choices_that_are_preempted_are_computed_again() -> None:
    """A pool for one and a half of them: 2 shared blocks, and 9 of each at the end."""
    async with open_bench(num_blocks=18) as bench:
        session = bench.worker.open_session("s")
        spec = spec_of(max_tokens=34)
        grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
        await commit(bench, grant, spec, FIRSTS)
        tokens, steps = await collect(session)
        assert tokens == {index: expected(spec, first) for index, first in FIRSTS.items()}
        (totals,) = (totals for step in steps for totals in step.totals)
        assert totals.computed_prompt_tokens > 0
        await bench.all_blocks_free()


async def test_the_prompt_is_known_afterwards_and_shared_the_next_time() -> None:
    async with open_bench(caches=True) as bench:
        session = bench.worker.open_session("s")
        spec = spec_of()
        for cached in (0, 2):
            grant, _ = await bench.worker.reserve("s", spec, timeout_s=60.0)
            assert (grant.num_cached_blocks, len(grant.block_ids)) == (cached, 3 - cached)
            await commit(bench, grant, spec, FIRSTS)
            tokens, _ = await collect(session)
            assert tokens == {index: expected(spec, first) for index, first in FIRSTS.items()}
            await bench.all_blocks_free()


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with open_bench(num_blocks=8) as bench:
        bench.worker.open_session("s")
        with pytest.raises(KvExhausted, match="for each of 7 choices"):
            await bench.worker.reserve("s", spec_of(10, n=7), timeout_s=60.0)
        with pytest.raises(KvExhausted, match="computes at once"):
            await bench.worker.reserve("s", spec_of(8, n=17), timeout_s=60.0)
        await bench.all_blocks_free()
