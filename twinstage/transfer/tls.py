"""TLS for the KV channel over TCP: both ends show a certificate of a CA that signs nothing but workers.

A certificate says "a worker", and not which one: the grant says where blocks go, and the channel's own handshake, which
comes after this one, says who is there. So the names in certificates are not looked at.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import HandshakeRefused, TransferError

_DROPPED_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTls:
    """What each end brings to the handshakes of new connections."""

    receiver: ssl.SSLContext
    sender: ssl.SSLContext


KvTlsSource = Callable[[], KvTls]  # what counts now: certificates are replaced while we run


def make_kv_tls(*, certificate: Path, key: Path, ca: Path) -> KvTls:
    """From PEM files, which are the same at both ends or of the same CA. Raises OSError or ssl.SSLError."""
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in contexts:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(ca)
    contexts[0].num_tickets = 0  # no session is ever resumed
    return KvTls(receiver=contexts[0], sender=contexts[1])


class TlsSocket:
    """What `FrameSocket` wants of a non-blocking socket, over TLS. One thread may read while another sends.

    OpenSSL lets one thread at a time use a connection. No call waits for the peer, so threads take turns.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Takes `connection` over, also when it fails. Raises OSError when the peer has gone already."""
        self._turn = threading.Lock()
        self._tls = context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)

    def agree(self) -> int | None:
        """Go on with the handshake: None when it is done, else the event of `poll` that it waits for.

        Raises HandshakeRefused or TransferError.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLEOFError as error:
            raise TransferError("the peer ended the connection during TLS's handshake") from error
        except ssl.SSLError as error:
            raise HandshakeRefused(
                f"TLS on the KV channel failed: {_reason(error)}; give all workers certificates of one CA "
                "(--kv-tls-certificate, --kv-tls-key, --kv-tls-ca)"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: the peer had gone before it began
            raise TransferError(f"the connection broke: {error}") from error
        return None

    def drop_unread(self) -> bool:
        """Read what has come, below TLS and for nobody; whether it was the last."""
        try:
            while socket.socket.recv(self._tls, _DROPPED_BYTES):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def fileno(self) -> int:
        return self._tls.fileno()

    def setblocking(self, flag: bool) -> None:
        self._tls.setblocking(flag)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Some of the bytes, never more than a record of TLS. Raises BlockingIOError, OSError."""
        return self._try(lambda: self._tls.send(buffers[0]))

    def recv_into(self, buffer: memoryview) -> int:
        """Some bytes; 0 at the end of the stream. Raises BlockingIOError, OSError."""
        return self._try(lambda: self._tls.recv_into(buffer))

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, Any]:
        """Some bytes into the first buffer, as `socket.recvmsg_into` gives them."""
        return self.recv_into(buffers[0]), [], 0, None

    def shutdown(self, how: int) -> None:
        """End the stream below TLS: what was read before it is still deciphered."""
        socket.socket.shutdown(self._tls, how)

    def close(self) -> None:
        self._tls.close()

    def _try(self, call: Callable[[], int]) -> int:
        with self._turn:
            try:
                return call()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error


def _reason(error: ssl.SSLError) -> str:
    return str(error.reason or error).replace("_", " ").lower()
