"""Sends cases to a cluster, many at a time, and judges each answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings

from random_requests.cases import GENERATING, METHODS, Case, Method, calls_of
from random_requests.details import missing_details
from twinstage.v1 import embedding_pb2, generation_pb2

CALLERS = 24  # at once
HANG_S = 60.0  # no request here takes that long; whose answer has not come by then never will
# Answers that tell a client about its request. INTERNAL, UNKNOWN, UNAVAILABLE and ABORTED would be our fault here.
ANSWERS = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,  # by AbortRequest, which other callers send
    }
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}
NOT_BEGUN = "Internal error from Core"  # what grpc.aio says itself of a call whose deadline came before it was sent
_RESPONSES = {
    "GenerateStream": generation_pb2.GenerateStreamResponse,
    "ChatStream": generation_pb2.ChatStreamResponse,
}


@dataclass(slots=True)
class Report:
    """What came of all requests."""

    codes: Counter[str] = field(default_factory=Counter)
    served: int = 0  # requests to generate that were
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        total = sum(self.codes.values())
        codes = ", ".join(f"{code} {count}" for code, count in self.codes.most_common())
        return f"{total} requests in {self.seconds:.0f} s, {self.served} generations served: {codes}"


def draw(count: int, *, seed_number: int) -> list[Case]:
    """So many cases or a few more, the same for the same seed: of every method, half of them of those that generate."""
    share = max(1, count // (2 * len(METHODS)))
    found = [case for number, method in enumerate(METHODS) for case in _of(method, share, seed_number + number)]
    missing = -(-max(0, count - len(found)) // len(GENERATING))  # Hypothesis ends early where it has seen everything
    generating = [method for method in METHODS if method.name in GENERATING]
    for number, method in enumerate(generating):
        found += _of(method, missing, seed_number + 1000 + number)
    random.Random(seed_number).shuffle(found)
    return found


def _of(method: Method, count: int, seed_number: int) -> list[Case]:
    found: list[Case] = []

    @seed(seed_number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls_of(method))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


async def send_all(address: str, found: Sequence[Case], *, problems_at_most: int = 5) -> Report:
    """Send the cases, `CALLERS` at a time. Ends early after so many problems."""
    report, started_s = Report(), time.monotonic()
    waiting = iter(found)

    async def work_off(channel: grpc.aio.Channel) -> None:
        for case in waiting:
            if len(report.problems) >= problems_at_most:
                return
            await _judge(channel, case, report)

    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(work_off(channels[number % len(channels)]))
    report.seconds = time.monotonic() - started_s
    return report


async def _judge(channel: grpc.aio.Channel, case: Case, report: Report) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            code, words, trailing, answers = await _send(channel, case)
    except TimeoutError:
        report.problems.append(f"no answer within {HANG_S:.0f} s: {_tell(case)}")
        return
    report.codes[code.name] += 1
    expected = ANSWERS | ({grpc.StatusCode.DEADLINE_EXCEEDED} if case.deadline_s is not None else frozenset())
    if code not in expected:
        report.problems.append(f"{code.name} ({words}): {_tell(case)}")
    for problem in missing_details(code, words, trailing, METHOD_OF[case.path].request.DESCRIPTOR):
        report.problems.append(f"{code.name} ({words}) with {problem}: {_tell(case)}")
    if case.method == "EncodeStream":
        items = map(embedding_pb2.EncodeStreamResponse.FromString, answers)
        faults = [item.error for item in items if item.error.code and _CODES[item.error.code] not in expected]
        report.problems += [f"an item with {fault}: {_tell(case)}" for fault in faults]
    if code is grpc.StatusCode.OK and case.method in GENERATING:
        report.served += 1
        if case.method in _RESPONSES and not _is_complete(case.method, answers):
            report.problems.append(f"a stream without its one summary at the end: {_tell(case)}")


async def _send(
    channel: grpc.aio.Channel, case: Case
) -> tuple[grpc.StatusCode, str, list[tuple[str, Any]], list[bytes]]:
    """Code, words, trailing metadata and answers; every kind of method is a stream on the wire."""
    call = channel.stream_stream(case.path)(_serialized(case.requests), timeout=case.deadline_s)
    leaving = None
    if case.leaves_after_s is not None:
        leaving = asyncio.get_running_loop().call_later(case.leaves_after_s, call.cancel)
    answers: list[bytes] = []
    try:
        answers = [answer async for answer in call]
    except (grpc.RpcError, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            call.cancel()
            raise
    finally:
        if leaving is not None:
            leaving.cancel()
    code, words = await call.code(), await call.details() or ""
    if words == NOT_BEGUN and case.deadline_s is not None:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    return code, words, list(await call.trailing_metadata() or ()), answers


async def _serialized(requests: Iterable[Message]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request.SerializeToString()


def _is_complete(method: str, answers: Sequence[bytes]) -> bool:
    events = [_RESPONSES[method].FromString(answer).WhichOneof("event") for answer in answers]
    return bool(events) and events[-1] == "summary" and events.count("summary") == 1


def _tell(case: Case) -> str:
    """The case as somebody can repeat it."""
    requests = [json_format.MessageToJson(request, indent=None) for request in case.requests]
    return f"{case.path} {' '.join(requests)[:2000]} deadline={case.deadline_s} leaves={case.leaves_after_s}"


def methods_of(found: Iterable[Case]) -> set[str]:
    """The methods that cases call."""
    return {case.path for case in found}


METHOD_OF = {method.path: method for method in METHODS}
ALL_METHODS = set(METHOD_OF)
