"""The life of a worker's process, the same for both roles.

    settings -> logging -> port -> NOT_SERVING while the model loads -> SERVING -> signal -> drained -> freed

Exit codes: 0 after SIGTERM or SIGINT, also while loading, 128 + its number after a second one; 2 for wrong flags, a
wrong model or a wrong machine, with one line on standard error; 1 when the books of KV blocks did not balance at the
end, or the end did not come.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

import grpc

from twinstage.errors import ConfigError, IntegrityError, ModelError
from twinstage.hosting.books import keep_checking
from twinstage.hosting.settings import WorkerSettings
from twinstage.rpc.callers import Caller, CallerInterceptor, callers_with_secrets, read_shared_secrets
from twinstage.rpc.health import OVERALL, HealthService
from twinstage.rpc.reloaded import Reloaded
from twinstage.rpc.server import Keepalive, bind, create_server, run_until_signalled
from twinstage.rpc.server_tls import credentials_of_process
from twinstage.rpc.tls import TlsFiles
from twinstage.rpc.worker_service import Loading, ServedWorker, WorkerServicer
from twinstage.settings import read_settings
from twinstage.telemetry.log import configure_logging, get_logger
from twinstage.telemetry.process import (
    STOP_SIGNALS,
    end_within,
    exit_with_parent_if_asked,
    settle_after_start,
    stop_at_once_while_starting,
)
from twinstage.transfer.tls import KvTls, KvTlsSource, make_kv_tls
from twinstage.transfer.values import KvIdentity
from twinstage.types import Role, WorkerDescription
from twinstage.worker.v1 import worker_pb2_grpc

WORKER_SERVICE = "twinstage.worker.v1.WorkerService"
LAST_WORDS_S = 1.0  # after the drain: in which those are told whose requests it did not finish
FREE_TIMEOUT_S = 15.0  # or longer than the lease, within which a peer that is stopped is noticed
# How long a thread that wants to run Python waits for one that does. A step computes without the interpreter's lock;
# when it ends, the engine's thread must not wait for all that the event loop happens to be converting and sending.
SWITCH_INTERVAL_S = 0.0005

MAX_CONNECTIONS = 256  # of routers, each of which needs one, and whoever else finds the port; more are closed

logger = get_logger(__name__)

Worker = TypeVar("Worker", bound=ServedWorker)
Settings = TypeVar("Settings", bound=WorkerSettings)


class WorkerProcess(Generic[Worker]):
    """Serves one worker: `add_services` puts its role's services on the server, `load` makes the worker.

    `load` runs on a thread, as reading a model takes time; what it returns is called on the event loop, to which the
    worker will belong. Heavy imports are best left to `load`: meanwhile the process answers signals and health checks.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        service_name: str,
        add_services: Callable[[grpc.aio.Server, Loading[Worker]], None],
        load: Callable[[], Callable[[asyncio.AbstractEventLoop], Worker]],
    ) -> None:
        self._settings = settings
        self._free_timeout_s = max(FREE_TIMEOUT_S, 1.5 * settings.lease)
        self._service_names = (WORKER_SERVICE, service_name)
        self._add_services = add_services
        self._load = load
        self._loading: Loading[Worker] = Loading()

    async def run(self) -> int:
        """Serve until a signal; returns the exit code. Raises ConfigError or ModelError when it cannot start."""
        credentials = credentials_of_process(self._settings)
        server = create_server(
            self._interceptors(),
            keepalive=Keepalive.of_lease(self._settings.lease),
            max_connections=MAX_CONNECTIONS,
        )
        health = HealthService(self._service_names)
        health.attach(server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self._loading), server)
        self._add_services(server, self._loading)
        port = bind(server, self._settings.listen, credentials)
        await server.start()
        logger.info("loading model", model=self._settings.model, port=port)
        try:
            make_worker = await self._load_unless_signalled()
            worker = make_worker(asyncio.get_running_loop())
        except BaseException:
            await server.stop(None)
            raise
        self._loading.set(worker)
        for name in (OVERALL, *self._service_names):
            health.set(name, serving=True)
        self._log_ready(worker, port)
        checking = asyncio.create_task(keep_checking(worker), name="check books")
        await run_until_signalled(
            server,
            health,
            grace_s=self._settings.drain_timeout,
            last_words_s=LAST_WORDS_S,
            on_drain=lambda: self._drain(worker),
        )
        checking.cancel()
        end_within(2 * self._free_timeout_s, exit_code=1)
        return await self._free(worker)

    def _interceptors(self) -> list[CallerInterceptor]:
        path = self._settings.worker_secret_file
        if path is None:
            return []

        def read() -> tuple[Caller, ...]:
            return callers_with_secrets("router", read_shared_secrets(path, flag="--worker-secret-file"))

        return [CallerInterceptor(Reloaded([path], read).current)]

    async def _load_unless_signalled(self) -> Callable[[asyncio.AbstractEventLoop], Worker]:
        """Load on a daemon thread, because loading cannot be interrupted; a signal ends the process at once."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Callable[[asyncio.AbstractEventLoop], Worker]] = loop.create_future()

        def work() -> None:
            try:
                result = self._load()
                settle_after_start()
            except BaseException as error:
                loop.call_soon_threadsafe(loaded.set_exception, error)
            else:
                loop.call_soon_threadsafe(loaded.set_result, result)

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, _leave_while_loading, number)
        context = contextvars.copy_context()  # with what is bound to the log
        threading.Thread(target=context.run, args=(work,), name="load", daemon=True).start()
        return await loaded  # the handlers stay until run_until_signalled sets its own

    def _log_ready(self, worker: Worker, port: int) -> None:
        description = worker.description
        logger.info(
            "worker ready",
            address=f"{self._settings.listen.rpartition(':')[0]}:{port}",
            worker_id=description.worker_id,
            model=description.model.name,
            task=description.model.task.value,
            max_model_len=description.model.max_model_len,
            kv_blocks=description.total_kv_blocks,
            transports=list(description.transports),
        )

    async def _drain(self, worker: Worker) -> None:
        """Finish what there is; what is left when the time is over fails, so that its router continues it elsewhere.

        The streams stay open then until the last words are said: a router that lost its load reports would call the
        worker lost before it heard what became of each request.
        """
        worker.begin_drain(for_good=True)
        try:
            await worker.wait_idle()
        except asyncio.CancelledError:
            worker.abort_all()
            raise
        worker.end_streams()

    async def _free(self, worker: Worker) -> int:
        """End what the grace period did not, free everything, and look at the books."""
        worker.abort_all()
        try:
            async with asyncio.timeout(self._free_timeout_s):
                await worker.wait_idle()
        except TimeoutError:
            logger.error("something still holds blocks", waited_s=self._free_timeout_s)
        try:
            leaked = await asyncio.to_thread(worker.close)
        except IntegrityError as error:
            logger.error("the block pool's books do not balance", error=str(error))
            return 1
        logger.info("worker stopped", leaked_blocks=leaked)
        return 1 if leaked else 0


def run_worker(
    role: Role,
    arguments: Sequence[str],
    *,
    settings: type[Settings],
    process: Callable[[Settings], WorkerProcess[Worker]],
) -> int:
    """Read the settings, run the process and return its exit code."""
    stop_at_once_while_starting()
    try:
        values = read_settings(settings, arguments)
        configure_logging(level=values.log_level, format=values.log_format, role=role.value)
        exit_with_parent_if_asked()
        values.bind_cpus()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return asyncio.run(process(values).run())
    except (ConfigError, ModelError) as error:
        print(f"{role.value}_worker: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def kv_secrets(settings: WorkerSettings) -> Callable[[], tuple[bytes, ...]]:
    """What the secrets of the KV channel are when it is asked. Raises ConfigError."""
    return Reloaded([settings.kv_secret_file], settings.kv_secrets).current


def kv_tls(settings: WorkerSettings) -> KvTlsSource | None:
    """TLS of the KV channel as its files say when it is asked; None without it. Raises ConfigError."""
    if settings.kv_tls is None:
        return None
    certificate, key, ca = settings.kv_tls
    files = TlsFiles(certificate=certificate, key=key, ca=ca, flag_prefix="--kv-tls-")

    def read() -> KvTls:
        files.read_pair()  # both say what is wrong with which file
        files.read_ca()
        try:
            return make_kv_tls(certificate=certificate, key=key, ca=ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kv-tls-certificate {certificate} cannot be used: {error}") from error

    return Reloaded(files.paths, read).current


def kv_identity(description: WorkerDescription) -> KvIdentity:
    """The worker as the KV channel knows it."""
    return KvIdentity(
        worker_id=description.worker_id,
        epoch=description.epoch,
        layout_fingerprint=description.kv_layout_fingerprint,
        protocol_version=description.protocol_version,
    )


def _leave_while_loading(number: int) -> NoReturn:
    """Nothing is served or shared yet, and files that were being prepared appear by a rename or not at all."""
    logger.info("stopped while loading", signal=signal.Signals(number).name)
    sys.stderr.flush()
    os._exit(0)
