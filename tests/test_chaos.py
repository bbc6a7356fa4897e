"""A small chaos run, and that its judge finds what is wrong. The long ones are `make chaos`."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from chaos.cases import Answer, AnsweredCase, answered_cases, make_chaos_model
from chaos.cluster import ChaosCluster, Shape
from chaos.drawing import draw_cases
from chaos.faults import Done, Saboteur
from chaos.judge import judge
from chaos.load import Failure, Observation, Received
from chaos.pooling import PoolingAnswer, Vector, make_embedder, pooling_cases
from chaos.report import document, explanation, summary, wait_s
from chaos.run import ChaosRun, Result
from chaos.schedule import Call, Fault, FaultKind, Plan, Schedule, draw, draw_rounds, from_json, to_json
from twinstage.types import Finish, FinishReason
from twinstage.v1 import common_pb2, embedding_pb2

SEEDS = range(310, 330)
NUM_CASES = 12
NUM_POOLING_CASES = 4
# Restarts take seconds of a processor, so they are rare here.
KINDS = {
    FaultKind.KILL: 1.0,
    FaultKind.TERMINATE: 0.3,
    FaultKind.ROUTER_KILL: 0.3,
    FaultKind.ROUTER_STOP: 0.3,
    FaultKind.STOP: 2.5,
    FaultKind.PARTITION: 3.0,
    FaultKind.DEAF: 1.5,
    FaultKind.MUTE: 1.5,
    FaultKind.DELAY: 1.5,
    FaultKind.CUT: 2.5,
    FaultKind.CANCEL_BURST: 2.0,
}


def _plan(shape: Shape) -> Plan:
    return Plan(
        workers=shape.worker_ids,
        links=shape.link_names,
        lasting=shape.embedder_ids,  # they start with PyTorch, which takes longer than all else here
        num_cases=NUM_CASES + NUM_POOLING_CASES,
        seconds=0.6,
        num_faults=3,
        faults_per_s=5.0,
        calls_per_s=10.0,
        resets_per_s=0.2,
        burst=10,
        longest_fault_s=0.7,
        patience_s=40.0,
        kinds=KINDS,
    )


@pytest.mark.timeout(600)  # the first one compiles kernels, on a machine that may be busy
def test_twenty_seeds(tmp_path: Path) -> None:
    model = make_chaos_model(tmp_path / "model")
    embedder = make_embedder(tmp_path / "embedder")
    drawn = draw_cases(NUM_CASES, longest=120, with_xgrammar=False)
    cases = answered_cases(model, drawn, weights="fp32", deterministic=False)
    cases += pooling_cases(embedder, count=NUM_POOLING_CASES, longest=40)
    models = {"model": str(model), "embedder": str(embedder)}
    shape = Shape(**models, prefill=2, decode=2, embedders=1, kv_cache_bytes=2 << 20, report_interval_s=0.1)
    schedules = [draw(seed, _plan(shape)) for seed in SEEDS]
    result = asyncio.run(_run(tmp_path, shape, cases, schedules))
    assert not result.violations, explanation(result, tmp_path)
    print(summary(document(result)))
    drawn = [fault for schedule in schedules for fault in schedule.faults]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert len(result.saboteur.done) > 2 / 3 * len(drawn), "the others were skipped, as their targets were down"
    assert sum(observation.failure is None for observation in result.observations) > len(result.observations) / 3


async def _run(directory: Path, shape: Shape, cases: list[AnsweredCase], schedules: list[Schedule]) -> Result:
    async with ChaosCluster(directory, shape).opened() as cluster:
        return await ChaosRun(cluster, cases, schedules, say=print, heals_between=False).play()


def test_a_seed_has_one_schedule() -> None:
    plan = _plan(Shape(model=""))
    assert draw(3, plan) == draw(3, plan)
    assert draw(3, plan) != draw(4, plan)
    rounds = draw_rounds(3, replace(plan, seconds=2.0, num_faults=7), round_s=0.6)
    assert [schedule.seed for schedule in rounds] == list(range(3, 3 + len(rounds)))
    assert rounds[0].faults == draw(3, plan).faults
    assert sum(len(schedule.faults) for schedule in rounds) <= 7
    assert from_json(to_json(rounds)) == rounds


# --- the judge ------------------------------------------------------------------------------------

ANSWER = Answer(
    num_prompt_tokens=3, token_ids=(5, 6, 7), text="abc", finish=Finish(reason=FinishReason.LENGTH), bits=()
)


def _observation() -> Observation:
    """A call that is as it should be."""
    received = Received(
        text="abc",
        token_ids=[5, 6, 7],
        finishes=[(common_pb2.FINISH_REASON_LENGTH, common_pb2.MatchedStop())],
        usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=3),
        placement=common_pb2.Placement(prefill_worker="prefill-0", decode_worker="decode-0"),
        prompt_tokens=3,
        num_summaries=1,
        event_times=array("d", [1.0]),
    )
    call = Call(at_s=0.0, case=0, is_streamed=True, deadline_s=30.0)
    return Observation(seed=1, call=call, began_s=100.0, ended_s=101.0, received=received, failure=None)


def _saboteur(*kinds: FaultKind) -> Saboteur:
    """One that broke things in the middle of the call."""
    saboteur = Saboteur(ChaosCluster.__new__(ChaosCluster), say=print)
    for kind in kinds:
        target = "router" if kind is FaultKind.ROUTER_KILL else "decode-0"
        saboteur.done.append(Done(fault=Fault(at_s=0, kind=kind, target=target), seed=1, began_s=100.5))
    return saboteur


def _kinds(observation: Observation, *faults: FaultKind) -> list[str]:
    return [violation.kind for violation in judge(observation, ANSWER, _saboteur(*faults))]


def test_the_judge_takes_the_right_answer_and_no_other() -> None:
    assert _kinds(_observation()) == []
    for field, value, kind in (
        ("token_ids", [5, 6, 8], "wrong tokens"),
        ("token_ids", [5, 6], "wrong tokens"),
        ("text", "abd", "wrong tokens"),
        ("text", "ab", "wrong tokens"),
        ("finishes", [(common_pb2.FINISH_REASON_STOP, common_pb2.MatchedStop())], "wrong tokens"),
        ("usage", common_pb2.Usage(prompt_tokens=3, completion_tokens=4), "wrong totals"),
        ("num_summaries", 2, "wrong totals"),
        ("disorder", ["delta after the end"], "disorder"),
    ):
        observation = _observation()
        setattr(observation.received, field, value)
        assert set(_kinds(observation)) == {kind}, field


def test_the_judge_takes_the_right_vectors_and_no_others() -> None:
    right = (np.array([0.25, 0.5], np.float32), np.array([1.0, 0.0], np.float32))
    lost = embedding_pb2.ItemError(code=grpc.StatusCode.UNAVAILABLE.value[0], reason="WORKER_LOST")

    def kinds(vectors: dict[int, Vector], *faults: FaultKind, **items: embedding_pb2.ItemError) -> set[str]:
        observation = _observation()
        usage = common_pb2.Usage(prompt_tokens=9)
        failures = {int(name[1:]): error for name, error in items.items()}
        observation.received = Received(vectors=vectors, usage=usage, item_failures=failures)
        answer = PoolingAnswer(vectors=right, num_prompt_tokens=9)
        return {violation.kind for violation in judge(observation, answer, _saboteur(*faults))}

    assert kinds({0: right[0], 1: right[1]}) == set()
    assert kinds({0: right[1], 1: right[0]}) == {"wrong vectors"}
    assert kinds({0: right[0], 1: right[1][:1]}) == {"wrong vectors"}
    assert kinds({0: right[0]}) == {"wrong totals"}
    assert kinds({0: right[0]}, FaultKind.KILL, _1=lost) == set()
    assert kinds({0: right[0]}, _1=lost) == {"wrong status"}


def _failed(code: grpc.StatusCode, *, tokens: int = 0, **details: object) -> Observation:
    observation = _observation()
    observation.received = Received(text="abc"[:tokens], token_ids=[5, 6, 7][:tokens])
    observation.failure = Failure(code=code, message="", **details)
    return observation


def test_the_judge_takes_fitting_statuses_and_no_others() -> None:
    lost = {"reason": "WORKER_LOST", "has_retry_info": True}
    broken = {"reason": "STREAM_BROKEN", "tokens_sent": 2}
    code = grpc.StatusCode
    assert _kinds(_failed(code.UNAVAILABLE, **lost), FaultKind.KILL) == []
    assert _kinds(_failed(code.UNAVAILABLE, **lost)) == ["wrong status"]
    assert _kinds(_failed(code.UNAVAILABLE, reason="WORKER_LOST"), FaultKind.KILL) == ["wrong status"]
    assert _kinds(_failed(code.UNAVAILABLE, tokens=1, **lost), FaultKind.KILL) == ["wrong status"]
    assert _kinds(_failed(code.UNAVAILABLE, tokens=1), FaultKind.ROUTER_KILL) == []
    assert _kinds(_failed(code.UNAVAILABLE, tokens=1), FaultKind.KILL) == ["wrong status"]
    assert _kinds(_failed(code.ABORTED, tokens=2, **broken), FaultKind.KILL) == []
    assert _kinds(_failed(code.ABORTED, tokens=1, **broken), FaultKind.KILL) == ["wrong status"]
    assert _kinds(_failed(code.ABORTED, tokens=2, **broken)) == ["wrong status"]
    assert _kinds(_failed(code.INTERNAL), FaultKind.KILL) == ["wrong status"]
    assert _kinds(_failed(code.CANCELLED), FaultKind.KILL) == ["wrong status"]
    poisoned = {"reason": "POISONED_REQUEST"}
    assert _kinds(_failed(code.INTERNAL, **poisoned), FaultKind.KILL, FaultKind.STOP) == []
    assert _kinds(_failed(code.INTERNAL, **poisoned), FaultKind.KILL) == ["wrong status"]
    wrong_beginning = _failed(code.ABORTED, tokens=2, **broken)
    wrong_beginning.received.token_ids[0] = 9
    assert _kinds(wrong_beginning, FaultKind.KILL) == ["wrong tokens"]


def test_the_judge_knows_a_deadline_from_a_hang() -> None:
    def at_deadline(deadline_s: float, *, late_s: float = 0.0) -> Observation:
        observation = _failed(grpc.StatusCode.DEADLINE_EXCEEDED)
        observation.call = replace(observation.call, deadline_s=deadline_s)
        observation.ended_s = observation.began_s + deadline_s + late_s
        return observation

    assert _kinds(at_deadline(0.5)) == []
    assert _kinds(at_deadline(30.0)) == ["hang"]
    late = at_deadline(0.5, late_s=9.0)
    assert _kinds(late) == ["hang"]
    assert judge(late, ANSWER, _saboteur(), observer_lag_s=8.0) == []
    early = at_deadline(5.0)
    early.ended_s = early.began_s + 1.0
    assert _kinds(early) == ["wrong status"]


def test_a_wait_is_counted_from_the_fault_also_when_some_tokens_were_still_on_their_way() -> None:
    assert wait_s(10.0, [9.9, 10.01, 12.0, 12.1]) == pytest.approx(1.99)
    assert wait_s(10.0, [9.0, 10.5]) == pytest.approx(0.5)
    assert wait_s(10.0, [10.2, 14.0, 20.0]) == pytest.approx(3.8), "what begins much later has another reason"
    assert wait_s(10.0, [8.0, 9.0]) is None
