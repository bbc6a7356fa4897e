"""The HTTP server of the metrics: one page, for a few readers at a time, whatever they send."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from twinstage.addresses import split_address
from twinstage.errors import ConfigError
from twinstage.telemetry.log import get_logger

if TYPE_CHECKING:
    from router.metrics import Metrics

MAX_CONNECTIONS = 16  # at once, each with a thread; more are closed
CONNECTION_S = 10.0  # for a request and its answer

logger = get_logger(__name__)


class MetricsServer:
    """Serves the metrics, on threads of its own, until it is closed."""

    def __init__(self, metrics: Metrics, address: str) -> None:
        """Listen at `address` (host:port; port 0 takes a free one). Raises ConfigError."""
        host, port = split_address(address)
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            kind = _ServerOfIpv6 if family is socket.AF_INET6 else _Server
            app = make_wsgi_app(metrics.registry)
            self._server = make_server(str(place[0]), port, app, server_class=kind, handler_class=_Handler)
        except OSError as error:
            raise ConfigError(f"--metrics-listen {address}: {error.strerror or error}; choose another port") from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    """Logs neither requests nor what is wrong with them."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def get_stderr(self) -> TextIO:
        """Where an answer that could not be sent is told of: nowhere."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a connection, up to MAX_CONNECTIONS, and each for CONNECTION_S at most."""

    daemon_threads = True
    request_queue_size = 64  # connections that the kernel keeps for it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(CONNECTION_S, _hang_up, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or was hung up on, is no error of this process."""
        logger.debug("metrics not read", error=repr(sys.exception()))


class _ServerOfIpv6(_Server):
    address_family = socket.AF_INET6


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # ended by itself
        connection.shutdown(socket.SHUT_RDWR)
