"""TCP proxies: one on threads that can hold back what passes, and one on an event loop that fails in many ways."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds


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


class FaultyLink:
    """Forwards connections to `target`, and fails as a network does. Belongs to one event loop.

    While a direction is blocked nothing crosses it, not even the end of a connection, and no new connection comes to
    be of use; what was sent meanwhile arrives afterwards, as TCP would have it. `delay_s` holds everything back.
    """

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._forward, self._backward = asyncio.Event(), asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.delay_s = 0.0
        self.heal()

    async def open(self) -> None:
        """Listen; `address` says where."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Stop listening and reset what is connected."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def block(self, *, forward: bool = True, backward: bool = True) -> None:
        """Let nothing pass towards the target, from it, or both."""
        if forward:
            self._forward.clear()
        if backward:
            self._backward.clear()

    def heal(self) -> None:
        """Let everything pass, and at once."""
        self.delay_s = 0.0
        self._forward.set()
        self._backward.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            _reset(writer)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._writers |= writers
        try:
            await self._forward.wait()
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            writers.add(target_writer)
            self._writers |= writers
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, target_writer, self._forward))
                pumps.create_task(self._pump(target_reader, writer, self._backward))
        except* OSError:
            pass  # one end is gone, and so the other learns of it
        finally:
            for each in writers:
                _reset(each)
            self._writers -= writers

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
        while data := await reader.read(65536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await passing.wait()
            writer.write(data)
            await writer.drain()
        await passing.wait()
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that its peer gets an error, and no orderly end."""
    with contextlib.suppress(OSError, AttributeError):  # closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
