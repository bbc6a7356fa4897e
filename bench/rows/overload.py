"""Asked for more than it can do: how many requests a router still serves well, and how much memory that takes.

Its workers compute nothing (`bench/engines/paced_workers.py`), so that their capacity is known: 16 sequences at once,
each a token every 50 ms. Requests arrive in an open loop at some times the rate at which these can be served. One is
good when its first token came within two seconds and the others at no more than three times the pace. The router is
told how long a request may wait for its turn, and refuses the others at once. Its memory and CPU time are those of the
last, long run.
"""

from __future__ import annotations

import asyncio
import threading
import time

from bench.machine import cpu_seconds, resident_bytes
from bench.paced_router import paced_router
from bench.results import Comparison, Curve, Measurement, RowResult, Series, Target
from bench.row import Context, Row
from twinstage.bench import LoadOptions, LoadResult, Slo, TokenRange, run_load
from twinstage.errors import InternalError

_ROWS, _TOKENS, _INTERVAL_MS = 16, 20, 50.0
_CAPACITY_PER_S = _ROWS / ((_TOKENS - 1) * _INTERVAL_MS / 1e3)  # the first token comes from the prefill worker
_SLO = Slo(ttft_s=2.0, itl_s=3 * _INTERVAL_MS / 1e3)
_FLAGS = ("--max-queue-wait", "1")
_TIMES = (0.5, 1.0, 2.0, 5.0, 10.0)
_RUN_S, _QUICK_RUN_S, _MAX_ROUNDS = 12.0, 6.0, 3
_MEMORY_S, _QUICK_MEMORY_S = 600.0, 60.0
_SETTLED_SHARE = 0.5  # of that time; what a moment took that was busier than others is kept by the allocator
_SAMPLE_S = 0.5


class _Memory:
    """Resident memory of a process over a time."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.samples: list[tuple[float, float]] = []  # seconds, megabytes

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        started_s = time.monotonic()
        while not self._ended.wait(_SAMPLE_S):
            self.samples.append((time.monotonic() - started_s, resident_bytes(self._process) / 1e6))

    @property
    def growth_mb(self) -> float:
        """From where it had settled to the most that it was afterwards."""
        until_s = _SETTLED_SHARE * self.samples[-1][0]
        settled_mb = max(mb for at_s, mb in self.samples if at_s <= until_s)
        return max(mb for at_s, mb in self.samples if at_s > until_s) - settled_mb


def measure(context: Context) -> RowResult:
    run_s, memory_s = (_QUICK_RUN_S, _QUICK_MEMORY_S) if context.quick else (_RUN_S, _MEMORY_S)
    workers = context.engine("paced_workers")
    results: dict[float, list[LoadResult]] = {times: [] for times in _TIMES}
    with paced_router(workers, decode=1, interval_ms=_INTERVAL_MS, rows=_ROWS, flags=_FLAGS) as (process, address, _):
        for round_number in range(1 if context.quick else min(context.rounds, _MAX_ROUNDS)):
            for times in _TIMES:
                context.progress(f"overload, {times:g} times the capacity, round {round_number + 1}")
                results[times].append(_load(address, times=times, seconds=run_s))
        context.progress(f"overload, memory at {_TIMES[-1]:g} times the capacity")
        cpu_s = cpu_seconds(process)
        with _Memory(process) as memory:
            long_run = _load(address, times=_TIMES[-1], seconds=memory_s)
        cost_ms = 1e3 * (cpu_seconds(process) - cpu_s) / long_run.requests.sent
    return _result(results, memory, cost_ms=cost_ms)


def _load(address: str, *, times: float, seconds: float) -> LoadResult:
    options = LoadOptions(
        addresses=(address,),
        rate_per_s=times * _CAPACITY_PER_S,
        duration_s=seconds,
        warmup_requests=0,
        prompt_tokens=TokenRange(32, 32),
        output_tokens=TokenRange(_TOKENS, _TOKENS),
        vocabulary_size=40_000,
        timeout_s=30.0,
        slo=_SLO,
    )
    return asyncio.run(run_load(options))


def _good_per_s(result: LoadResult) -> float:
    """Good requests per second, until the last answer: what had piled up when the last request came does not add."""
    if result.goodput is None:
        raise InternalError("the load run did not count good requests")
    return result.goodput.requests_per_s


def _result(results: dict[float, list[LoadResult]], memory: _Memory, *, cost_ms: float) -> RowResult:
    good = {times: [_good_per_s(run) for run in runs] for times, runs in results.items()}
    best = [max(values) for values in zip(*good.values(), strict=True)]
    ratios = [
        Comparison(
            case=f"{times:g} times the capacity",
            what="good requests per second over the best",
            values=[value / most for value, most in zip(good[times], best, strict=True)],
            target=Target.at_least(0.9) if times == 2.0 else None,
        )
        for times in _TIMES
        if times > 1
    ]
    long_case = f"{_TIMES[-1]:g} times the capacity, {memory.samples[-1][0]:.0f} s"
    growth = Comparison(
        case=long_case,
        what="growth of the router's resident memory",
        values=[memory.growth_mb],
        target=Target.at_most(10.0),
        unit="MB",
    )
    cost = Comparison(case=long_case, what="the router's CPU time per request", values=[cost_ms], unit="ms")
    pace_ms = 1e3 * (_SLO.itl_s or 0.0)
    return RowResult(
        measurements=[entry for times in _TIMES for entry in _measurements(times, results[times], good[times])],
        comparisons=[*ratios, growth, cost],
        curves=[_curve(good), _memory_curve(memory)],
        notes=[
            f"Capacity: {_CAPACITY_PER_S:.1f} requests/s of {_TOKENS} tokens. Good: the first token within "
            f"{_SLO.ttft_s:g} s, later ones every {pace_ms:g} ms or sooner on average. Growth is by how much "
            "the most that the router held in the second half of the time is above the most of the first half."
        ],
    )


def _measurements(times: float, runs: list[LoadResult], good: list[float]) -> list[Measurement]:
    case = f"{times:g} times the capacity"
    quantities = {
        ("good requests", "1/s"): good,
        ("requests that failed", "%"): [100 * run.requests.failed / run.requests.sent for run in runs],
        ("time to first token p99", "ms"): [1e3 * run.ttft.p99_s if run.ttft else 0.0 for run in runs],
    }
    return [
        Measurement(case=case, engine="router", quantity=quantity, unit=unit, values=values)
        for (quantity, unit), values in quantities.items()
    ]


def _curve(good: dict[float, list[float]]) -> Curve:
    points = [(times, sorted(values)[len(values) // 2]) for times, values in good.items()]
    return Curve(
        name="overload",
        title="Good requests over the rate of arrivals",
        x_label="times the capacity",
        y_label="good requests per second",
        series=[Series(name="good", points=points)],
        logarithmic=True,
    )


def _memory_curve(memory: _Memory) -> Curve:
    step = max(1, len(memory.samples) // 200)
    return Curve(
        name="overload_memory",
        title=f"The router's memory at {_TIMES[-1]:g} times the capacity",
        x_label="seconds",
        y_label="resident megabytes",
        series=[Series(name="router", points=memory.samples[::step])],
    )


ROW = Row(name="overload", title="Overload", measure=measure, limit_s=900)
