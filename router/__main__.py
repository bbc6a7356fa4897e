"""The router's process: `python -m router --workers host:port ...`.

    settings -> logging -> workers are dialled -> port -> requests, as soon as workers are ready -> signal -> drained

Exit codes: 0 after SIGTERM or SIGINT, 128 + its number after a second one; 2 for wrong flags or a port in use, with one
line on standard error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from router.admission import Admission
from router.config import RouterSettings
from router.embedding import Embedding
from router.gate import Gate
from router.generation import Deadlines, Generation
from router.live import LiveRequests
from router.observer import RouterObserver
from router.poison import PoisonBook
from router.quotas import Quotas
from router.scoring import Scoring
from router.service import SERVICE_NAMES, WORK_OF_SERVICE, add_services, right_for, served_methods, update_health
from router.text_threads import TextThreads
from router.trace import Traces
from router.workers import WorkerTable
from twinstage.errors import ConfigError
from twinstage.grammar.checking import GrammarChecks
from twinstage.rpc.callers import Caller, CallerInterceptor, read_callers
from twinstage.rpc.health import SERVICE_NAME as HEALTH_SERVICE
from twinstage.rpc.health import HealthService
from twinstage.rpc.reflection import add_reflection
from twinstage.rpc.reloaded import Reloaded
from twinstage.rpc.server import bind, create_server, run_until_signalled
from twinstage.rpc.server_tls import credentials_of_process
from twinstage.settings import read_settings
from twinstage.telemetry.log import configure_logging, get_logger
from twinstage.telemetry.process import (
    end_within,
    exit_with_parent_if_asked,
    settle_after_start,
    stop_at_once_while_starting,
)
from twinstage.text.template_process import TemplateProcesses

if TYPE_CHECKING:
    from router.metrics import ClusterCollector, Metrics
    from router.metrics_server import MetricsServer
    from router.trace_export import TraceExporter

LIVE_PER_DECODE_ROW = 2  # the next requests are computed and handed over while those in the batch run
MIN_LIVE_GENERATIONS = 16  # also while no decode worker is ready: requests of one token need none
END_TIMEOUT_S = 1.0  # from the end of the last call until the process has ended; threads may still render or look up
MAX_LIVE_EMBEDDINGS = 256  # unless configured; what they hold is memory of the router alone

logger = get_logger(__name__)


class Router:
    """All parts of a router, wired."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._sources = settings.sources()
        self._credentials = credentials_of_process(settings)
        self._executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenize")
        # Of their own: a call to embed brings thousands of texts, for which no prompt shall wait.
        self._embedding_executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenize-inputs")
        self._text_threads = TextThreads(settings.tokenizer_threads)
        self._health = HealthService(SERVICE_NAMES)
        self._exporter = self._make_exporter()
        self._live = LiveRequests(Traces(on_end=self._exporter.add) if self._exporter is not None else None)
        self._quotas = Quotas()
        self._callers = self._read_callers()
        self._grammars = GrammarChecks(default_backend=settings.default_grammar_backend)
        self._draining = asyncio.Event()
        self._generation_gate = self._make_gate(self._max_live_generations, first_live=self._first_live_generations)
        self._embedding_gate = self._make_gate(lambda: settings.max_live_requests or MAX_LIVE_EMBEDDINGS)
        self._served: list[str] = []  # services that have workers
        self.workers = WorkerTable(
            report_interval_s=settings.report_interval,
            lookup_interval_s=settings.lookup_interval,
            access=settings.worker_access().current,
            on_change=self._workers_changed,
        )
        self._metrics, self._collector = self._make_metrics()
        self._metrics_server: MetricsServer | None = None
        self._server = create_server(
            self._interceptors(),
            max_receive_bytes=settings.max_message_bytes,
            max_connections=settings.connections_at_most,
            max_streams_per_connection=settings.max_streams_per_connection,
            max_connection_age_s=settings.max_connection_age,
            max_connection_age_grace_s=settings.max_connection_age_grace,
            observer=RouterObserver(self._live.traces, self._metrics, traced=WORK_OF_SERVICE),
        )
        self._add_services()
        self.port = 0

    def _make_gate(self, max_live: Callable[[], int], first_live: Callable[[], int] | None = None) -> Gate:
        return Gate(
            max_live=max_live,
            first_live=first_live,
            max_queued=self._settings.max_queued_requests,
            max_wait_s=self._settings.max_queue_wait,
            weights=self._settings.caller_weights,
        )

    def _make_exporter(self) -> TraceExporter | None:
        if not self._settings.otlp_endpoint:
            return None
        from router.trace_export import TraceExporter

        return TraceExporter(self._settings.otlp_endpoint)

    def _make_metrics(self) -> tuple[Metrics | None, ClusterCollector | None]:
        if not self._settings.metrics_listen:
            return None, None
        from router.metrics import ClusterCollector, Metrics  # their library is imported only where it is wanted

        metrics = Metrics(served_methods())
        gates = {"generate": self._generation_gate, "embed": self._embedding_gate}
        collector = ClusterCollector(gates, lambda: self.workers.entries)
        metrics.registry.register(collector)
        return metrics, collector

    def _read_callers(self) -> Reloaded[tuple[Caller, ...]] | None:
        path = self._settings.tokens_file
        if path is None:
            return None
        callers = Reloaded([path], lambda: read_callers(path, flag="--tokens-file"), on_change=self._quotas.set_callers)
        self._quotas.set_callers(callers.current())
        return callers

    def _interceptors(self) -> list[CallerInterceptor]:
        if self._callers is None:
            return []
        if self._credentials is None:
            logger.warning("tokens travel in the clear: pass --tls-certificate, or put TLS before this router")
        return [CallerInterceptor(self._callers.current, right_for=right_for)]

    def _add_services(self) -> None:
        settings, generation_gate, embedding_gate = self._settings, self._generation_gate, self._embedding_gate
        templates = TemplateProcesses(settings.tokenizer_threads)
        deadlines = Deadlines(default_s=settings.default_timeout, longest_s=settings.max_timeout)
        poison = PoisonBook(settings.poison_memory)
        generation = Generation(
            workers=self.workers,
            admission=Admission(self._executor, templates, settings.parsers()),
            gate=generation_gate,
            live=self._live,
            deadlines=deadlines,
            policy=settings.failover_policy(),
            max_priority=settings.priority_at_most,
            quotas=self._quotas,
            metrics=self._metrics,
            grammars=self._grammars,
            poison=poison,
        )
        embedding = Embedding(
            workers=self.workers,
            executor=self._embedding_executor,
            gate=embedding_gate,
            live=self._live,
            deadlines=deadlines,
            policy=settings.failover_policy(),
            quotas=self._quotas,
            poison=poison,
        )
        add_services(
            self._server,
            workers=self.workers,
            generation=generation,
            embedding=embedding,
            scoring=Scoring(embedding),
            generation_gate=generation_gate,
            embedding_gate=embedding_gate,
            live=self._live,
            draining=self._draining,
            deadlines=deadlines,
            text_threads=self._text_threads,
            templates=templates,
            trusts_chat_templates=settings.trust_request_chat_template,
            parsers=settings.parsers(),
        )
        self._health.attach(self._server)
        add_reflection(self._server, (*SERVICE_NAMES, HEALTH_SERVICE), ending=self._draining)

    def _max_live_generations(self) -> int:
        rows = self.workers.decode_rows
        return self._settings.max_live_requests or max(MIN_LIVE_GENERATIONS, LIVE_PER_DECODE_ROW * rows)

    def _first_live_generations(self) -> int:
        """Until it is known how long they take: those that are computed at once, without the next ones."""
        return max(MIN_LIVE_GENERATIONS, self.workers.decode_rows)

    def _workers_changed(self) -> None:
        if (served := update_health(self._health, self.workers)) != self._served:
            self._served = served
            logger.info("serving", services=served)
        self._generation_gate.admit_waiting()  # whose limit may have grown

    async def start(self) -> None:
        """Listen, and begin to connect to the workers. Raises ConfigError when a port is taken."""
        self.port = bind(self._server, self._settings.listen, self._credentials)
        self._start_metrics()
        self.workers.start(self._sources)
        await self._server.start()
        update_health(self._health, self.workers)

    def _start_metrics(self) -> None:
        if self._metrics is not None and self._collector is not None:
            from router.metrics_server import MetricsServer

            self._collector.on_loop(asyncio.get_running_loop())
            self._metrics_server = MetricsServer(self._metrics, self._settings.metrics_listen)
            logger.info("metrics", port=self._metrics_server.port)

    @property
    def metrics_port(self) -> int:
        """Where metrics are served; 0 when they are not."""
        return self._metrics_server.port if self._metrics_server is not None else 0

    async def run(self) -> None:
        """Serve until a signal."""
        try:
            await self.start()
            settle_after_start()
            host = self._settings.listen.rpartition(":")[0]
            logger.info("router ready", address=f"{host}:{self.port}", workers=self._settings.workers)
            await run_until_signalled(
                self._server, self._health, grace_s=self._settings.drain_timeout, on_drain=self._drain
            )
            end_within(END_TIMEOUT_S, exit_code=0)
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End everything now. Idempotent."""
        await self._server.stop(None)
        await self.workers.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)  # a scrape may be waiting for this loop
            self._metrics_server = None
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        await self._grammars.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._embedding_executor.shutdown(wait=False, cancel_futures=True)
        self._text_threads.close()

    async def _drain(self) -> None:
        """Refuse new requests, and wait for those in progress."""
        self._generation_gate.close()
        self._embedding_gate.close()
        self._draining.set()
        await self._live.wait_idle()


async def _serve(settings: RouterSettings) -> None:
    await Router(settings).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a router until it is told to stop; returns the exit code."""
    stop_at_once_while_starting()
    try:
        settings = read_settings(RouterSettings, sys.argv[1:] if arguments is None else arguments)
        exit_with_parent_if_asked()
        configure_logging(level=settings.log_level, format=settings.log_format, role="router")
        asyncio.run(_serve(settings))
    except ConfigError as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
