"""A TCP proxy that can hold back what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class SlowProxy:
    """Forwards connections to another address; `hold` stops the bytes towards it, `run_free` lets them go on.

    While held, a few kilobytes still pass from time to time, so that the peer sees a slow channel and not a dead one.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._target: tuple[str, int] | None = None
        self._free = threading.Event()
        self._free.set()
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._free.set()
        for connection in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(5)

    def cut(self) -> None:
        """Break every connection off."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forward_to(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))

    def hold(self) -> None:
        self._free.clear()

    def run_free(self) -> None:
        self._free.set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._target is None:
                client.close()
                continue
            server = socket.create_connection(self._target, timeout=5)
            server.settimeout(None)
            self._sockets += [client, server]
            for source, sink, slow in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(source, sink, slow), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if slow:
                    self._free.wait(0.25)
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
