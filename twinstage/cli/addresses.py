"""Addresses to listen at, and to reach what listens there."""

from __future__ import annotations

import contextlib
import errno
import socket

from twinstage.errors import ConfigError

_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def reachable(listen_address: str) -> str:
    """An address at which a client on this machine reaches a server that listens at `listen_address`."""
    host, _, port = listen_address.rpartition(":")
    return f"{_LOOPBACK_OF.get(host, host)}:{port}"


def check_port_is_free(host: str, port: int) -> None:
    """Raises ConfigError when nothing could listen there. Port 0, which the system picks, is always free."""
    if port == 0:
        return
    try:
        targets = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    for family, kind, protocol, _, target in targets:
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not count
            try:
                probe.bind(target)
            except OSError as error:
                raise ConfigError(_cannot_listen(host, port, error)) from error


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; end what listens there, or pass another --port (0 takes a free one)"
    return f"cannot listen on {host}:{port}: {error.strerror}; pass another --host or --port"
