"""TLS for the KV channel over TCP: both ends show a certificate of a CA that signs nothing but workers.

A certificate says "a worker", and not which one: the grant says where blocks go, and the channel's own handshake,
which comes after this one, says who is there. So the names in certificates are not looked at. That handshake proves the
secret together with the receiver's certificate (as in RFC 5929, `tls-server-end-point`): who has another certificate of
the CA, and sits between two workers that have a secret, cannot pass the proof of one on to the other.
"""

from __future__ import annotations

import hashlib
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import HandshakeRefused, TransferError

# RFC 8446, 5.5: with AES-GCM some 2^24.5 records under one key. OpenSSL takes no new key by itself.
MAX_BYTES_PER_CONNECTION = 256 * 2**30

_DROPPED_BYTES = 65536
_CERTIFICATE = re.compile(r"-----BEGIN ([A-Z0-9 ]*)CERTIFICATE-----.*?-----END \1CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTls:
    """What each end brings to the handshakes of new connections."""

    receiver: ssl.SSLContext
    sender: ssl.SSLContext
    certificate_sha256: bytes


KvTlsSource = Callable[[], KvTls]  # what counts now: certificates are replaced while we run


def make_kv_tls(*, certificate: Path, key: Path, ca: Path) -> KvTls:
    """From PEM files. All workers may have the same, or each its own of the same CA.

    Raises OSError (ssl.SSLError) or ValueError.
    """
    receiver, sender = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    written = certificate.read_bytes()
    for context in (receiver, sender):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key, password=lambda: "")  # else OpenSSL would ask on the terminal
        context.load_verify_locations(ca)
    receiver.num_tickets = 0  # no session is ever resumed
    if certificate.read_bytes() != written:
        raise OSError(f"{certificate} was changed while it was read")
    first = _CERTIFICATE.search(written.decode("ascii", errors="replace"))
    if first is None or first[1]:  # OpenSSL takes such a one, and would show another than the one hashed here
        raise ValueError(f"the first certificate in {certificate} must begin with BEGIN CERTIFICATE")
    own = ssl.PEM_cert_to_DER_cert(first[0])
    return KvTls(receiver=receiver, sender=sender, certificate_sha256=hashlib.sha256(own).digest())


class TlsSocket:
    """What `FrameSocket` wants of a non-blocking socket, over TLS. One thread may read while another sends.

    OpenSSL lets one thread at a time use a connection. No call waits for the peer, so threads take turns.
    """

    def __init__(self, connection: socket.socket, source: KvTlsSource, *, is_receiver: bool) -> None:
        """Take `connection` over; `source` is asked when the handshake begins."""
        self._turn = threading.Lock()
        self._socket = connection
        self._tls: ssl.SSLSocket | None = None
        self._source = source
        self._is_receiver = is_receiver
        self._is_closed = False
        self._own_sha256 = b""
        self.bytes_sent = 0

    @property
    def receiver_sha256(self) -> bytes:
        """What the handshake has shown to be the digest of the receiver's certificate."""
        if self._is_receiver:
            return self._own_sha256
        certificate = self._tls.getpeercert(binary_form=True) if self._tls is not None else None
        if certificate is None:
            raise TransferError("the peer has shown no certificate")
        return hashlib.sha256(certificate).digest()

    def agree(self) -> int | None:
        """Begin the handshake, or go on with it: None when it is done, else the event of `poll` that it waits for.

        Raises HandshakeRefused or TransferError.
        """
        tls = self._tls or self._begin()
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLEOFError as error:
            raise TransferError("the peer ended the connection during TLS's handshake") from error
        except ssl.SSLError as error:
            raise _refused(error) from error
        except (OSError, ValueError) as error:  # ValueError: the peer had gone before it began
            raise TransferError(f"the connection broke: {error}") from error
        return None

    def _begin(self) -> ssl.SSLSocket:
        now = self._source()
        context = now.receiver if self._is_receiver else now.sender
        problem = ""
        with self._turn:
            try:
                self._socket.getpeername()  # when it has no peer any more, wrapping it loses the descriptor
                tls = context.wrap_socket(self._socket, server_side=self._is_receiver, do_handshake_on_connect=False)
                self._tls = self._socket = tls
                self._own_sha256 = now.certificate_sha256
                return tls
            except OSError as error:
                problem = str(error)
        raise TransferError(f"the connection broke: {problem}")

    def drop_unread(self) -> bool:
        """Read some of what has come, below TLS and for nobody; whether that was the end."""
        try:
            return not socket.socket.recv(self._socket, _DROPPED_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send the first buffer. Raises BlockingIOError, OSError, HandshakeRefused.

        After a BlockingIOError nothing else may be sent before the same bytes: some of them have gone out.
        """
        sent = self._try(lambda tls: tls.send(buffers[0]))
        self.bytes_sent += sent
        return sent

    def recv_into(self, buffer: memoryview) -> int:
        """Some bytes; 0 at the end of the stream. Raises BlockingIOError, OSError, HandshakeRefused."""
        return self._try(lambda tls: tls.recv_into(buffer))

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, Any]:
        """Some bytes into the first buffer, as `socket.recvmsg_into` gives them."""
        return self.recv_into(buffers[0]), [], 0, None

    def shutdown(self, how: int) -> None:
        """End the stream below TLS: what was read before it is still deciphered."""
        with self._turn:  # while the handshake begins there is a moment without a socket to end
            socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        with self._turn:  # a closing SSLSocket forgets that it is one before it is closed
            self._is_closed = True
            self._socket.close()

    def _try(self, call: Callable[[ssl.SSLSocket], int]) -> int:
        with self._turn:
            if self._is_closed or self._tls is None:
                raise OSError("the connection is closed, or has no TLS yet")
            try:
                return call(self._tls)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error
            except ssl.SSLError as error:
                if "ALERT" in (error.reason or ""):  # a client hears only now that it is not wanted
                    raise _refused(error) from error
                raise


def _refused(error: ssl.SSLError) -> HandshakeRefused:
    why = getattr(error, "verify_message", "") or str(error.reason or error).replace("_", " ").lower()
    return HandshakeRefused(
        f"TLS on the KV channel failed: {why}; all workers of a model need certificates that are valid now, of CAs "
        "that the others trust (--kv-tls-certificate, --kv-tls-key, --kv-tls-ca)"
    )
