"""Gaps between the tokens of running streams while a long prompt is prefilled beside them.

Disaggregated, with one core a worker, decoding goes on undisturbed. In one process with both cores, each chunk of the
prompt is computed in the same step as the streams' next tokens, and they wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.engines.protocol import Prompts
from bench.results import Comparison, Curve, Measurement, RowResult, Series, Target
from bench.row import Context, Row
from bench.serving import greedy, serving, timed_request
from bench.summary import gaps, percentile, ratios
from twinstage.client import TwinstageClient
from twinstage.types import TokenPrompt

_STREAMS = 4
_CONTEXT = 128  # tokens of the streams' own prompts
_PROMPT, _QUICK_PROMPT = 2_000, 500
_QUIET_S = 6.0
_QUIET_STEPS = 100
_MORE_TOKENS = 3_000  # the streams are cancelled, they do not end


@dataclass
class Streams:
    """Streams that run until they are stopped, each read on a thread; `arrivals` are `(stream, seconds)`."""

    client: TwinstageClient
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, prompts: list[list[int]]) -> None:
        """Start them and wait until each has brought ten tokens."""
        for number, prompt in enumerate(prompts):
            self._threads.append(threading.Thread(target=self._read, args=(number, prompt), daemon=True))
            self._threads[-1].start()
        deadline_s = time.monotonic() + 60
        while any(sum(stream == number for stream, _ in self.arrivals) < 10 for number in range(len(prompts))):
            if self.errors or time.monotonic() > deadline_s:
                raise TimeoutError(f"the streams do not run: {self.errors or 'no tokens'}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(30)
        if self.errors:
            raise self.errors[0]

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """Gaps that end within a window, of all streams."""
        found: list[float] = []
        for number in range(len(self._threads)):
            times = [at_s for stream, at_s in self.arrivals if stream == number]
            found += [gap for gap, at_s in zip(gaps(times), times[1:], strict=True) if start_s <= at_s <= end_s]
        return found

    def _read(self, number: int, prompt: list[int]) -> None:
        try:
            with self.client.generate_stream(TokenPrompt(token_ids=tuple(prompt)), greedy(_MORE_TOKENS)) as stream:
                for delta in stream:
                    self.arrivals += [(number, time.monotonic())] * len(delta.token_ids)
                    if self._stopped.is_set():
                        return
        except Exception as error:
            self.errors.append(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What one way to serve did: the p99 of each round in seconds, and the timeline of the last round."""

    quiet: Sequence[float]
    busy: Sequence[float]
    line: Series


def measure(context: Context) -> RowResult:
    length = _QUICK_PROMPT if context.quick else _PROMPT
    name = f"Twinstage {context.engines.precision}"
    apart = _disaggregated(context, length, name=f"{name}, disaggregated, one core a worker")
    together = _aggregated(context, length, name=f"{name}, one process, all cores")
    case = f"{_STREAMS} streams, a prompt of {length:,} tokens"
    curve = Curve(
        name="gaps",
        title=f"Gaps between tokens of one of {_STREAMS} streams; a prompt of {length:,} tokens comes",
        x_label="seconds",
        y_label="gap [ms]",
        series=[apart.line, together.line],
    )
    return RowResult(
        measurements=[*_measurements(apart), *_measurements(together)],
        comparisons=[
            _comparison(case, apart, target=Target.at_most(1.5)),
            _comparison(case, together, target=None),
        ],
        curves=[curve],
    )


def _measurements(found: Gaps) -> list[Measurement]:
    return [
        Measurement(
            case=case,
            engine=found.line.name,
            quantity="inter-token gap p99",
            unit="ms",
            values=[1e3 * value for value in values],
        )
        for case, values in (("quiet", found.quiet), ("prompt beside", found.busy))
    ]


def _comparison(case: str, found: Gaps, *, target: Target | None) -> Comparison:
    return Comparison(
        case=case,
        what=f"inter-token gap p99, prompt beside / quiet, {found.line.name}",
        values=ratios(found.busy, found.quiet),
        target=target,
    )


def _disaggregated(context: Context, length: int, *, name: str) -> Gaps:
    quiet: list[float] = []
    busy: list[float] = []
    prompts = Prompts()
    flags = context.engines.own_flags
    with serving(context, worker_flags=flags) as cluster, TwinstageClient(cluster.address) as client:
        timed_request(client, prompts.next(length), max_tokens=2)  # warm
        for round_number in range(context.rounds):
            context.progress(f"gaps, disaggregated, round {round_number + 1}")
            streams = Streams(client)
            streams.start([prompts.next(_CONTEXT) for _ in range(_STREAMS)])
            began_s = time.monotonic()
            time.sleep(_QUIET_S)
            request = timed_request(client, prompts.next(length), max_tokens=2)
            streams.stop()
            quiet.append(percentile(streams.gaps_between(began_s, request.sent_s), 0.99))
            busy.append(percentile(streams.gaps_between(request.sent_s, request.times[0]), 0.99))
    return Gaps(quiet=quiet, busy=busy, line=_timeline(name, streams, began_s))


def _aggregated(context: Context, length: int, *, name: str) -> Gaps:
    engine = context.engine("twinstage", **context.engines.own[0])
    quiet, busy = [], []
    for round_number in range(context.rounds):
        context.progress(f"gaps, one process, round {round_number + 1}")
        answer = engine.call("gaps", streams=_STREAMS, context=_CONTEXT, prompt=length, quiet_steps=_QUIET_STEPS)
        quiet.append(percentile(answer["quiet"], 0.99))
        busy.append(percentile(answer["busy"], 0.99))
    at_s, points = 0.0, []
    for gap in [*answer["quiet"], *answer["busy"]]:
        at_s += gap
        points.append((at_s, 1e3 * gap))
    return Gaps(quiet=quiet, busy=busy, line=Series(name=name, points=points))


def _timeline(name: str, streams: Streams, began_s: float) -> Series:
    times = [at_s for stream, at_s in streams.arrivals if stream == 0 and at_s >= began_s]
    return Series(
        name=name, points=[(at_s - began_s, 1e3 * gap) for gap, at_s in zip(gaps(times), times[1:], strict=True)]
    )


ROW = Row(name="gaps", title="Gaps between tokens while a prompt is prefilled", measure=measure, limit_s=360)
