"""When a request is tried again, and when it is not: attempts are bounded, and one that kills workers is found out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fake_workers import FakeDecode, FakePrefill, until
from flow_rig import Rig, expected_text, request, running
from router.attempt import AttemptFailed
from router.config import RouterSettings
from router.failover import Attempts, FailoverPolicy, Probation
from router.placement import WorkerKey
from router.poison import MAX_SENTENCES, PoisonBook
from twinstage.errors import ComputeFailed, NoWorker, PoisonedRequest, StreamBroken, WorkerLost
from twinstage.settings import read_settings
from twinstage.types import RawGenerationRequest, RawSampling, RequestId, Role, TextPrompt, WorkerId

POISON = "poison"
PATIENT = FailoverPolicy(worker_wait_s=5.0, resume_wait_s=5.0)
OFF = FailoverPolicy(max_attempts=1)


async def dying_of_poison(worker: FakePrefill | FakeDecode) -> None:
    """Kill the worker whenever it computes for the poison, and start it again."""
    marked = tuple(POISON.encode())
    while True:
        await until(lambda: worker.address and _computes(worker, len(marked)), what="poison", timeout_s=60)
        await asyncio.sleep(0.05)  # for those who are there, too
        await worker.kill()
        if isinstance(worker, FakePrefill):
            worker.specs.clear()
            worker.running.clear()
        await asyncio.sleep(0.05)
        await worker.restart()


def _computes(worker: FakePrefill | FakeDecode, length: int) -> bool:
    if isinstance(worker, FakePrefill):
        return any(len(spec.prompt_token_ids) == length for spec in worker.specs)
    running = (reservation for reservation in worker.reservations.values() if reservation.task is not None)
    return any(len(reservation.spec.prompt_token_ids) == length for reservation in running)


@contextlib.asynccontextmanager
async def poisonable(rig: Rig, role: Role) -> AsyncIterator[None]:
    """Workers of a role that compute slowly enough to be killed, and die of the poison."""
    workers = rig.cluster.prefill if role is Role.PREFILL else rig.cluster.decode
    for worker in workers:
        phase, seconds = ("first_token", 0.25) if role is Role.PREFILL else ("decode", 0.1)
        worker.script.slow(phase, seconds=seconds)
    watchers = [asyncio.create_task(dying_of_poison(worker)) for worker in workers]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_poisoned_request_is_refused_and_those_beside_it_live(role: Role) -> None:
    async with running(prefill=2, decode=2, policy=PATIENT) as rig:
        with capture_logs() as logs:
            async with poisonable(rig, role):
                innocent = [asyncio.create_task(rig.collect(request(6))) for _ in range(6)]
                poisoned = request(6, prompt=TextPrompt(text=POISON), request_id="the-poison")
                with pytest.raises(PoisonedRequest, match="2 workers"):
                    await rig.collect(poisoned)
                answers = await asyncio.gather(*innocent)
        deaths = _deaths(rig)
        with pytest.raises(PoisonedRequest, match="this very request"):  # sent again, it takes no more workers
            await rig.collect(replace(poisoned, request_id="the-same-poison"))
        assert _deaths(rig) == deaths
        assert [answer.text for answer in answers] == [expected_text(rig.cluster, 6)] * 6
        assert any(answer.summary.placement.retries for answer in answers), "some were there when a worker died"
        named = [entry for entry in logs if entry["event"] == "poisoned request refused"]
        assert [entry["request_id"] for entry in named] == ["the-poison"]
        assert len(named[0]["workers"]) == 2
        assert all(name.startswith(role.value) for name in named[0]["workers"])


def _deaths(rig: Rig) -> int:
    return sum(worker.description.epoch - 1 for worker in (*rig.cluster.prefill, *rig.cluster.decode))


def test_what_was_convicted_is_refused_for_a_while_and_nothing_else() -> None:
    now_s = 0.0
    book = PoisonBook(10.0, clock=lambda: now_s)
    model, other = (SimpleNamespace(description=SimpleNamespace(fingerprint=name)) for name in "ab")
    poison = request(6, prompt=TextPrompt(text=POISON), request_id="one")

    def is_refused(raw: RawGenerationRequest, model: Any = model, caller: str = "somebody") -> bool:
        try:
            book.check(raw, model, caller=caller)
        except PoisonedRequest:
            return True
        return False

    book.convict(poison, model, caller="somebody")
    assert is_refused(poison)
    assert is_refused(replace(poison, request_id="two"))
    assert not is_refused(poison, model=other)
    assert not is_refused(poison, caller="somebody else")
    assert not is_refused(replace(poison, sampling=RawSampling(seed=8)))
    assert not is_refused(request(7, prompt=TextPrompt(text=POISON)))
    now_s = 10.0
    assert not is_refused(poison)
    book.convict(poison, model, caller="somebody")  # again, so for longer
    now_s = 29.0
    assert is_refused(poison)
    now_s = 50.0  # long enough that it is forgotten
    assert not is_refused(poison)
    assert len(book) == 0
    book.convict(poison, model, caller="somebody")
    now_s = 60.0
    assert not is_refused(poison)
    for seed in range(MAX_SENTENCES + 5):
        book.convict(request(sampling=RawSampling(seed=seed)), model, caller="somebody")
    assert len(book) == MAX_SENTENCES
    assert is_refused(request(sampling=RawSampling(seed=MAX_SENTENCES)))


async def test_an_innocent_request_may_see_as_many_deaths_as_a_poison_in_company() -> None:
    """Two deaths of its workers, but the second one when it had come past the point of the first."""
    worker, other = WorkerKey(WorkerId("a"), 1), WorkerKey(WorkerId("b"), 1)
    attempts, probation = Attempts(FailoverPolicy(), request_id=RequestId("r")), Probation()
    for key, progresses in ((worker, False), (other, True)):
        with probation.trial("model", attempts.suspected_on) as trial:
            await trial.turn()
            trial.computing(key)
            if progresses:
                trial.progressed(Role.DECODE)
            failure = AttemptFailed(WorkerLost("gone"), frozenset({key}))
            attempts.failed(failure, trial, decode=key, tokens=3)
    assert attempts.failures == 2
    restarted = WorkerKey(WorkerId("a"), 2)
    with probation.trial("model", attempts.suspected_on) as trial:
        await trial.turn()
        trial.computing(restarted)
        with pytest.raises(PoisonedRequest):
            attempts.failed(
                AttemptFailed(WorkerLost("gone"), frozenset({restarted})), trial, decode=restarted, tokens=3
            )


async def test_a_death_on_each_leg_is_an_accident_twice() -> None:
    prefill, decode = WorkerKey(WorkerId("p"), 1), WorkerKey(WorkerId("d"), 1)
    attempts, probation = Attempts(FailoverPolicy(), request_id=RequestId("r")), Probation()
    for key in (prefill, decode):
        with probation.trial("model", attempts.suspected_on) as trial:
            await trial.turn()
            trial.computing(key)
            attempts.failed(AttemptFailed(WorkerLost("gone"), frozenset({key})), trial, decode=decode, tokens=3)
            assert trial.is_alone == (key is decode)


async def test_a_death_counts_once_though_its_news_are_late() -> None:
    """The next suspect is placed on the worker that has just died: nobody has told the table of workers yet."""
    worker, probation = WorkerKey(WorkerId("w"), 1), Probation()
    lost = AttemptFailed(WorkerLost("gone"), frozenset({worker}))
    suspect = Attempts(FailoverPolicy(), request_id=RequestId("r"))
    for is_first in (True, False):
        with probation.trial("model", suspect.suspected_on) as trial:
            await trial.turn()
            trial.computing(worker)
            suspect.failed(lost, trial, decode=worker, tokens=0)
            assert bool(trial.exposed) == is_first
    assert suspect.failures == 2


async def test_suspects_have_their_turn_one_after_the_other() -> None:
    probation = Probation()
    with probation.trial("model", Role.PREFILL) as first, probation.trial("model", Role.DECODE) as second:
        await first.turn()
        assert first.is_alone
        with probation.trial("another", Role.PREFILL) as elsewhere, probation.trial("model", None) as fresh:
            await asyncio.gather(elsewhere.turn(), fresh.turn())
            assert (elsewhere.is_alone, fresh.is_alone) == (True, False)
        waiting = asyncio.create_task(second.turn())
        await asyncio.sleep(0.05)
        assert first.is_alone
        assert not waiting.done()
        first.progressed(Role.PREFILL)
        await waiting
        second.progressed(Role.PREFILL)
        assert second.is_alone, "its worker died on the other leg"


async def test_a_suspect_that_goes_on_beside_another_takes_the_proof_from_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.failover.PROBATION_WAIT_S", 0.1)
    probation = Probation()
    with contextlib.ExitStack() as stack:
        holder, impatient, third, last = (stack.enter_context(probation.trial("m", Role.PREFILL)) for _ in range(4))
        await holder.turn()
        assert holder.is_alone
        await impatient.turn()
        assert not impatient.is_alone, "it has waited long enough"
        assert not holder.is_alone, "its worker may die of the other one"
        holder.end()
        await third.turn()
        assert not third.is_alone, "the turn is its own, but the impatient one still computes"
        impatient.end()
        third.end()
        await last.turn()
        assert last.is_alone


async def test_a_suspect_needs_its_turn_only_when_it_has_its_grant_and_to_wait_for_it_is_no_attempt() -> None:
    policy = FailoverPolicy(max_attempts=2, worker_wait_s=5.0)
    async with running(prefill=3, policy=policy) as rig:
        decode, probation = rig.cluster.decode[0], rig.generation.probation
        for worker in rig.cluster.prefill:
            worker.script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        await until(lambda: _holding(rig, "running"), what="a prefill")
        go_on = decode.script.stall("reserve")
        await _holding(rig, "running")[0].kill()
        await until(lambda: _holding(rig, "waiting"), what="a suspect without its grant")
        with probation.trial("fake", Role.PREFILL) as other:
            async with asyncio.timeout(2):
                await other.turn()
            assert other.is_alone
            go_on.set()
            await until(lambda: decode.reservations, what="a grant")
            await asyncio.sleep(0.1)
            (worker,) = _holding(rig, "waiting")  # for its turn, now
            await worker.kill()
            await until(lambda: _holding(rig, "waiting") not in ([], [worker]), what="the suspect elsewhere")
            for worker in rig.cluster.prefill:
                worker.script = type(worker.script)()
        assert (await call).text == expected_text(rig.cluster, 8)


def _holding(rig: Rig, what: str) -> list[FakePrefill]:
    return [worker for worker in rig.cluster.prefill if getattr(worker, what)]


@pytest.mark.parametrize("end", ["killed", "only lost"])
async def test_who_waits_for_a_grant_is_placed_again_at_once_and_is_no_suspect(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.failover.PROBATION_WAIT_S", 60.0)
    async with running(prefill=2) as rig:
        rig.cluster.decode[0].script.stall("reserve")  # it has no blocks for the first attempt
        call = asyncio.create_task(rig.collect(request(8)))
        await until(lambda: any(worker.waiting for worker in rig.cluster.prefill), what="a call without its grant")
        (worker,) = (worker for worker in rig.cluster.prefill if worker.waiting)
        # Whoever were a suspect would wait for its turn until its deadline.
        with rig.generation.probation.trial("fake", Role.PREFILL) as other:
            await other.turn()
            if end == "killed":
                await worker.kill()
            else:  # as when its load reports stay away
                life = rig.workers.life(WorkerKey(worker.description.worker_id, worker.description.epoch))
                await life.connection.close()
            async with asyncio.timeout(10):
                answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1


async def test_a_failure_of_the_model_is_no_death() -> None:
    async with running(prefill=2, decode=1) as rig:
        for worker in rig.cluster.prefill:
            worker.script.fail("first_token", ComputeFailed("always"), times=9)
        with pytest.raises(ComputeFailed):
            await rig.collect(request(8))


# --- attempts -------------------------------------------------------------------------------------


async def test_without_failover_a_request_is_tried_once() -> None:
    async with running(prefill=2, decode=2, policy=OFF) as rig:
        for worker in rig.cluster.prefill:
            worker.script.fail("first_token", WorkerLost("gone"))
        with pytest.raises(WorkerLost, match="gone"):
            await rig.collect(request(8))
        assert sum(len(worker.specs) for worker in rig.cluster.prefill) == 1
        for worker in rig.cluster.prefill:
            worker.script = type(worker.script)()
        for worker in rig.cluster.decode:
            worker.script.fail("decode 3", WorkerLost("gone"))
            worker.script.slow("decode", seconds=0.05)
        with pytest.raises(StreamBroken, match="gone") as caught:
            await rig.collect(request(8))
        assert caught.value.tokens_sent == 3


def test_what_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(RouterSettings, []).failover_policy() == FailoverPolicy()
    flags = ["--max-attempts", "5", "--poison-limit", "4", "--worker-wait", "0", "--resume-wait", "7"]
    expected = FailoverPolicy(max_attempts=5, poison_limit=4, worker_wait_s=0.0, resume_wait_s=7.0)
    assert read_settings(RouterSettings, flags).failover_policy() == expected
    assert read_settings(RouterSettings, [*flags, "--no-failover"]).failover_policy().max_attempts == 1
    monkeypatch.setenv("TWINSTAGE_FAILOVER", "false")
    assert read_settings(RouterSettings, []).failover_policy().max_attempts == 1


async def test_attempts_are_as_many_as_the_operator_says() -> None:
    async with running(policy=FailoverPolicy(max_attempts=5)) as rig:
        rig.cluster.prefill[0].script.fail("first_token", ComputeFailed("always"), times=9)
        with pytest.raises(ComputeFailed):
            await rig.collect(request(8))
        assert len(rig.cluster.prefill[0].specs) == 5


# --- waiting for a worker -------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_request_waits_for_its_only_worker_to_come_back(role: Role) -> None:
    async with running(policy=PATIENT) as rig:
        worker = rig.cluster.prefill[0] if role is Role.PREFILL else rig.cluster.decode[0]
        phase = "first_token" if role is Role.PREFILL else "decode 3"
        worker.script.stall(phase)
        call = asyncio.create_task(rig.collect(request(8)))
        await worker.script.reached(phase).wait()
        await worker.kill()
        await asyncio.sleep(0.3)
        assert not call.done()
        await worker.restart()
        answer = await call
        assert answer.text == expected_text(rig.cluster, 8)
        assert answer.summary.placement.retries == 1


async def test_a_worker_that_was_only_out_of_reach_has_another_chance() -> None:
    async with running(policy=PATIENT) as rig:
        worker = rig.cluster.prefill[0]
        worker.script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        await worker.script.reached("first_token").wait()
        epoch = worker.description.epoch
        await worker.kill()
        await asyncio.sleep(0.2)
        await worker.start()
        assert (await call).text == expected_text(rig.cluster, 8)
        assert worker.description.epoch == epoch


async def test_the_wait_for_a_worker_is_bounded_by_its_own_time_and_by_the_deadline() -> None:
    policy = FailoverPolicy(worker_wait_s=0.4, resume_wait_s=30.0)
    async with running(policy=policy) as rig:
        worker = rig.cluster.prefill[0]
        worker.script.stall("first_token")
        call = asyncio.create_task(rig.collect(request(8)))
        await worker.script.reached("first_token").wait()
        began_s = time.monotonic()
        await worker.kill()
        worker.running.clear()
        with pytest.raises(WorkerLost):
            await call
        assert 0.4 <= time.monotonic() - began_s < 5.0
        began_s = time.monotonic()
        with pytest.raises(NoWorker):
            await rig.collect(request(8))
        assert time.monotonic() - began_s < 0.4, "a request that has not failed is refused at once"
