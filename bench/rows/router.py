"""What the router costs: the latency it adds, the deltas it passes on, and how that grows.

Its workers compute nothing (`bench/engines/paced_workers.py`), so that what remains is the router's. Added latency:
time to the first token through the router, reservation on a decode worker included, against a call of the prefill
worker itself. Deltas: those of a second of the router's CPU time, as one process cannot use more than one core; streams
make a token each at a steady pace, so that no deltas are merged.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import grpc

from bench.engines.client import EngineProcess
from bench.machine import cpu_seconds
from bench.paced_router import paced_router
from bench.results import Comparison, Curve, Measurement, RowResult, Series, Target
from bench.row import Context, Row
from bench.serving import greedy
from bench.summary import summarize
from twinstage.client import AsyncTwinstageClient
from twinstage.errors import InternalError
from twinstage.rpc.convert_worker import sequence_spec_to_proto
from twinstage.types import RequestId, SamplingParameters, SequenceSpec, TokenPrompt
from twinstage.worker.v1 import worker_pb2

_PROMPT = tuple(range(1_000, 1_128))
_REQUESTS = 200  # of a round
_STREAMS = 64
_TOKENS = 200  # of a stream
_INTERVAL_MS = 25.0  # 64 streams: 2,560 tokens a second
_STREAM_COUNTS = (1, 8, 32, 64, 128, 256)
_WORKER_COUNTS = (1, 2, 4, 8, 16)
_FLAGS = ("--max-live-requests", "1024")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """What some streams cost the router."""

    deltas: int
    tokens: int
    wall_s: float
    router_cpu_s: float


def measure(context: Context) -> RowResult:
    workers = context.engine("paced_workers")
    direct, routed, costs = [], [], []
    with paced_router(workers, decode=1, interval_ms=0.0, flags=_FLAGS) as (_, address, prefill_address):
        for round_number in range(-1, context.rounds):
            context.progress(f"router, added latency, round {round_number + 1}")
            count = _REQUESTS // 4 if context.quick else _REQUESTS
            through, alone = asyncio.run(_latencies(address, prefill_address, count))
            if round_number >= 0:
                routed.append(1e3 * through)
                direct.append(1e3 * alone)
    with paced_router(workers, decode=1, interval_ms=_INTERVAL_MS, flags=_FLAGS) as (process, address, _):
        for round_number in range(context.rounds):
            context.progress(f"router, deltas, round {round_number + 1}")
            costs.append(asyncio.run(_stream(process, address, streams=_STREAMS, tokens=_TOKENS)))
        by_streams = _curve_over_streams(context, process, address)
    by_workers = _curve_over_workers(context, workers)
    return _result(routed, direct, costs, [by_streams, by_workers])


async def _latencies(address: str, prefill_address: str, count: int) -> tuple[float, float]:
    """Median seconds to the first token through the router, and of the prefill worker alone; taken in turn."""
    through, alone = [], []
    async with AsyncTwinstageClient(address) as client, grpc.aio.insecure_channel(prefill_address) as channel:
        prefill = _prefill_at_once(channel)
        for number in range(count):
            started_s = time.perf_counter()
            async with client.generate_stream(TokenPrompt(token_ids=_PROMPT), greedy(2)) as stream:
                await anext(stream)
                through.append(time.perf_counter() - started_s)
                async for _ in stream:
                    pass
            request = worker_pb2.PrefillRequest(sequence=sequence_spec_to_proto(_spec(number)))
            started_s = time.perf_counter()
            await anext(aiter(prefill(request)))
            alone.append(time.perf_counter() - started_s)
    return summarize(through).median, summarize(alone).median


def _prefill_at_once(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamMultiCallable[Any, Any]:
    """The prefill worker's call with all its requests in one send: the least that it can cost."""
    return channel.unary_stream(
        "/twinstage.worker.v1.PrefillService/Prefill",
        request_serializer=worker_pb2.PrefillRequest.SerializeToString,
        response_deserializer=worker_pb2.PrefillResponse.FromString,
    )


def _spec(number: int) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(f"direct-{time.monotonic_ns()}-{number}"),
        prompt_token_ids=_PROMPT,
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=1,
    )


async def _stream(process: int, address: str, *, streams: int, tokens: int) -> StreamCost:
    """Run some streams at once to their end."""
    deltas = 0
    received = 0

    async def one(client: AsyncTwinstageClient) -> None:
        nonlocal deltas, received
        async with client.generate_stream(TokenPrompt(token_ids=_PROMPT), greedy(tokens)) as stream:
            async for delta in stream:
                deltas += bool(delta.token_ids)
                received += len(delta.token_ids)

    async with AsyncTwinstageClient(address) as client:
        await client.models()  # connected
        started_s, cpu_s = time.perf_counter(), cpu_seconds(process)
        await asyncio.gather(*(one(client) for _ in range(streams)))
        cost = StreamCost(
            deltas=deltas,
            tokens=received,
            wall_s=time.perf_counter() - started_s,
            router_cpu_s=cpu_seconds(process) - cpu_s,
        )
    if received != streams * tokens:
        raise InternalError(f"{received} tokens arrived of {streams * tokens}")
    return cost


def _curve_over_streams(context: Context, process: int, address: str) -> Curve:
    points = []
    for streams in _STREAM_COUNTS[:3] if context.quick else _STREAM_COUNTS:
        context.progress(f"router, {streams} streams")
        cost = asyncio.run(_stream(process, address, streams=streams, tokens=max(50, min(400, 6_400 // streams))))
        points.append((float(streams), 1e6 * cost.router_cpu_s / cost.tokens))
    return Curve(
        name="router_over_streams",
        title="The router's CPU time per token over streams",
        x_label="streams at once",
        y_label="microseconds",
        series=[Series(name="1 prefill and 1 decode worker", points=points)],
        logarithmic=True,
    )


def _curve_over_workers(context: Context, workers: EngineProcess) -> Curve:
    points = []
    for count in _WORKER_COUNTS[:2] if context.quick else _WORKER_COUNTS:
        context.progress(f"router, {count} decode workers")
        with paced_router(workers, decode=count, interval_ms=_INTERVAL_MS, flags=_FLAGS) as (process, address, _):
            cost = asyncio.run(_stream(process, address, streams=_STREAMS, tokens=100))
        points.append((float(count), 1e6 * cost.router_cpu_s / cost.tokens))
    return Curve(
        name="router_over_workers",
        title=f"The router's CPU time per token over decode workers, {_STREAMS} streams",
        x_label="decode workers",
        y_label="microseconds",
        series=[Series(name=f"{_STREAMS} streams", points=points)],
        logarithmic=True,
    )


def _result(routed: list[float], direct: list[float], costs: list[StreamCost], curves: list[Curve]) -> RowResult:
    """`routed` and `direct` in milliseconds, a value per round like `costs`."""
    latencies = {"through the router": routed, "the prefill worker alone": direct}
    streams = {
        ("deltas received", "1/s"): [cost.deltas / cost.wall_s for cost in costs],
        ("tokens per delta", ""): [cost.tokens / cost.deltas for cost in costs],
    }
    return RowResult(
        measurements=[
            *(
                Measurement(case="first token p50", engine=name, quantity="latency", unit="ms", values=values)
                for name, values in latencies.items()
            ),
            *(
                Measurement(case=f"{_STREAMS} streams", engine="router", quantity=quantity, unit=unit, values=values)
                for (quantity, unit), values in streams.items()
            ),
        ],
        comparisons=_comparisons(routed, direct, costs),
        curves=curves,
    )


def _comparisons(routed: list[float], direct: list[float], costs: list[StreamCost]) -> list[Comparison]:
    return [
        Comparison(
            case="one client",
            what="added latency p50",
            values=[through - alone for through, alone in zip(routed, direct, strict=True)],
            target=Target.at_most(2.0),
            unit="ms",
        ),
        Comparison(
            case=f"{_STREAMS} streams",
            what="deltas per second of the router's CPU time",
            values=[cost.deltas / cost.router_cpu_s for cost in costs],
            target=Target.at_least(5_000),
            unit="1/s",
        ),
    ]


ROW = Row(name="router", title="Router", measure=measure, limit_s=240)
