"""Metrics in Prometheus' format, at http://METRICS_LISTEN/metrics: calls, latencies of requests, and the workers.

The router hears of everything there is to measure: workers report their load and, with each request, how long its parts
took. So one address tells of the whole cluster. `docs/observe.md` lists what it tells.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.gate import Gate
from router.outbox import DeltaEvent, Event, FinishEvent, PromptEvent, SummaryEvent
from router.worker_entry import WorkerEntry
from twinstage.types import WorkerLoad

# Seconds: from a step of a small model to an answer that takes minutes.
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
_LOOK_TIMEOUT_S = 5.0  # of a scrape, for the event loop to say how things are

_GAUGES: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
    ("kv_blocks_free", "KV blocks that nobody holds, cached ones included.", lambda load: load.free_kv_blocks),
    ("kv_blocks_cached", "KV blocks that only the prefix cache keeps.", lambda load: load.cached_kv_blocks),
    ("kv_blocks_leaked", "KV blocks held for no known request: 0.", lambda load: load.leaked_kv_blocks),
    ("sequences_running", "Sequences being computed.", lambda load: load.running),
    ("sequences_waiting", "Sequences that wait.", lambda load: load.waiting),
    ("waiting_tokens", "Prompt tokens that wait to be computed.", lambda load: load.waiting_tokens),
    ("requests_unfinished", "Requests in whatever phase.", lambda load: load.unfinished),
)
_COUNTERS: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
    ("requests_finished", "Requests finished.", lambda load: load.finished),
    ("kv_received_bytes", "Bytes of KV blocks received.", lambda load: load.kv_bytes_received),
    ("prefix_blocks_queried", "Blocks of prompts looked for in the cache.", lambda load: load.prefix_looked_up_blocks),
    ("prefix_blocks_hit", "Those of them that were found.", lambda load: load.prefix_found_blocks),
)


class Metrics:
    """All that is counted while requests are served."""

    def __init__(self, methods: Collection[str]) -> None:
        """`methods` are those that are served, as "/package.Service/Method": no other name becomes a label."""
        self._methods = frozenset(methods)
        self.registry = registry = CollectorRegistry()
        method = ("grpc_service", "grpc_method")
        self._handled = Counter(
            "grpc_server_handled", "Calls that ended, by code.", (*method, "grpc_code"), registry=registry
        )
        self._handling = Histogram(
            "grpc_server_handling_seconds", "Time of calls.", method, registry=registry, buckets=_BUCKETS
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = self._histogram("inter_token_seconds", "Between two tokens of one answer.")
        self._parts = {
            name: self._histogram(f"{name}_seconds", text)
            for name, text in (
                ("queue", "Waiting at the router and in the workers' queues."),
                ("tokenize", "Rendering and tokenizing."),
                ("prefill", "Computing the prompt."),
                ("kv_transfer", "From the end of the prefill until decode has the KV blocks."),
                ("decode", "On the decode worker."),
                ("request", "From arrival to the end."),
            )
        }
        self._finished = self._counter("requests_finished", "Answers, by finish reason.", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens that a prefix cache saved.")
        self._generated_tokens = self._counter("generated_tokens", "Tokens generated.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"twinstage_{name}", text, ("model",), registry=self.registry, buckets=_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"twinstage_{name}", text, ("model", *labels), registry=self.registry)

    def handled(self, method: str, code: str, seconds: float) -> None:
        """A call of "/package.Service/Method" has ended, with a gRPC code by name."""
        known = method if method in self._methods else "/other/other"
        service, _, name = known.removeprefix("/").partition("/")
        self._handled.labels(service, name, code).inc()
        self._handling.labels(service, name).observe(seconds)

    def watch(self, model: str, arrived_s: float) -> Callable[[Event], None]:
        """What measures one request, from the events that its client gets."""
        last_s: dict[int, float] = {}  # of each choice that has a token

        def see(event: Event) -> None:
            match event:
                case PromptEvent():
                    self._first_token.labels(model).observe(time.monotonic() - arrived_s)
                case DeltaEvent() if event.tokens:
                    self._saw_tokens(model, event, last_s)
                case FinishEvent():
                    self._finished.labels(model, event.finish.reason.name).inc()
                case SummaryEvent():
                    self._summarize(model, event)

        return see

    def _saw_tokens(self, model: str, event: DeltaEvent, last_s: dict[int, float]) -> None:
        now_s = time.monotonic()
        if (before_s := last_s.get(event.index)) is not None:
            for _ in event.tokens:  # those of one step share its time
                self._inter_token.labels(model).observe((now_s - before_s) / len(event.tokens))
        last_s[event.index] = now_s

    def _summarize(self, model: str, event: SummaryEvent) -> None:
        timing, usage = event.timing, event.usage
        for name, seconds in (
            ("queue", timing.queue_s),
            ("tokenize", timing.tokenize_s),
            ("prefill", timing.prefill_s),
            ("kv_transfer", timing.kv_transfer_s),
            ("decode", timing.decode_s),
            ("request", timing.total_s),
        ):
            self._parts[name].labels(model).observe(seconds)
        self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self._cached_tokens.labels(model).inc(usage.cached_prompt_tokens)
        self._generated_tokens.labels(model).inc(usage.completion_tokens)


class ClusterCollector(Collector):
    """Gates and workers as they are when somebody asks."""

    def __init__(self, gates: dict[str, Gate], workers: Callable[[], Sequence[WorkerEntry]]) -> None:
        self._gates = gates
        self._workers = workers
        self._loop: asyncio.AbstractEventLoop | None = None  # until the server runs

    def on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look from this event loop only, to which gates and workers belong."""
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' library wants it; called on its thread."""
        if self._loop is None:
            return iter(())
        future = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        return iter(future.result(timeout=_LOOK_TIMEOUT_S))

    async def _look(self) -> list[Metric]:
        return [*self._of_gates(), *self._of_workers()]

    def _of_gates(self) -> Iterator[Metric]:
        rows: tuple[tuple[str, str, Callable[[Gate], int]], ...] = (
            ("requests_live", "Requests in progress.", lambda gate: gate.live),
            ("requests_queued", "Requests that wait for their turn.", lambda gate: gate.queued),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(f"twinstage_{name}", text, labels=("kind",))
            for kind, gate in self._gates.items():
                family.add_metric((kind,), value(gate))
            yield family

    def _of_workers(self) -> Iterator[Metric]:
        labels = ("worker", "role", "model")
        known = [
            ((entry.description.worker_id, entry.description.role.value, entry.description.model.name), entry)
            for entry in self._workers()
            if entry.description is not None and entry.life is not None
        ]
        total = GaugeMetricFamily("twinstage_worker_kv_blocks", "KV blocks of the pool.", labels=labels)
        for values, entry in known:
            assert entry.description is not None
            total.add_metric(values, entry.description.total_kv_blocks)
        yield total
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, value in rows:
                family = kind(f"twinstage_worker_{name}", text, labels=labels)
                for values, entry in known:
                    if entry.load is not None:
                        family.add_metric(values, value(entry.load))
                yield family
