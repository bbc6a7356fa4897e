"""Everyone who is connected to a receiver: those who have proved who they are, and those who still have to.

Whoever can reach the port can connect; only who knows the secret gets beyond the handshake. So the unproved have a
small room of their own, in which they take no place away from the proved. When it is full the one who has been there
longest has to leave: a handshake takes milliseconds, and a silent stranger must not keep others out for as long as he
is given. Each transport has rooms of its own: TCP reaches further than a socket in a directory of this user's, and
whoever fills its rooms keeps nobody out who comes for shared memory.
"""

from __future__ import annotations

import threading
import time

from twinstage.telemetry.log import get_logger
from twinstage.transfer.connection import Connection
from twinstage.transfer.messages import Transport
from twinstage.transfer.wire import FrameSocket

logger = get_logger(__name__)

MAX_CONNECTIONS = 256  # of each transport, as are the handshakes
MAX_HANDSHAKES = 32


class Callers:
    """The connections of one receiver, each with the thread that serves it; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[threading.Thread, FrameSocket] = {}
        self._transports: dict[threading.Thread, Transport] = {}
        self._greeting: dict[threading.Thread, FrameSocket] = {}  # those in the handshake, the oldest first
        self._connections: dict[threading.Thread, Connection] = {}  # those that passed it
        self._closing = False

    def arrive(self, thread: threading.Thread, stream: FrameSocket, transport: Transport) -> bool:
        """Somebody has connected, whom `thread` will serve. False: there are too many, and nobody entered him."""
        with self._lock:
            greeting = [other for other in self._greeting if self._transports[other] == transport]
            if list(self._transports.values()).count(transport) - len(greeting) >= MAX_CONNECTIONS:
                return False
            if len(greeting) >= MAX_HANDSHAKES:
                self._greeting.pop(greeting[0]).end()
                logger.warning("a kv handshake was cut short: too many at once", limit=MAX_HANDSHAKES)
            self._streams[thread] = self._greeting[thread] = stream
            self._transports[thread] = transport
            return True

    def establish(self, thread: threading.Thread, connection: Connection) -> bool:
        """The handshake is done. False: he had to leave meanwhile."""
        with self._lock:
            if self._closing or self._greeting.pop(thread, None) is None:
                return False
            self._connections[thread] = connection
            return True

    def leave(self, thread: threading.Thread) -> None:
        """The conversation is over; the socket is closed after this."""
        with self._lock:
            self._connections.pop(thread, None)
            self._greeting.pop(thread, None)
            self._streams.pop(thread, None)
            self._transports.pop(thread, None)

    def end_all(self, *, shutdown_s: float) -> None:
        """Ask senders to leave, wait `shutdown_s` for it, and leave behind those that do not. Nobody arrives now."""
        with self._lock:  # a thread leaves the books under this lock before it closes its socket
            self._closing = True
            streams, connections = dict(self._streams), dict(self._connections)
            for thread, stream in streams.items():
                if thread in connections:
                    connections[thread].hang_up()
                else:
                    stream.end()
        deadline_s = time.monotonic() + shutdown_s
        for thread in streams:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive() and thread in connections:
                connections[thread].abandon()
                thread.join()
