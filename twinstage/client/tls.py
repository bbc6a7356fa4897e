"""TLS for clients."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import grpc

from twinstage.rpc.tls import TlsFiles, channel_credentials


def tls_credentials(
    ca: str | PathLike[str] | None = None,
    *,
    certificate: str | PathLike[str] | None = None,
    key: str | PathLike[str] | None = None,
) -> grpc.ChannelCredentials:
    """Credentials for a client of a router that speaks TLS, from PEM files.

    The router's certificate must be of `ca`, by default of one of the CAs that gRPC itself trusts. `certificate` and
    `key` are the client's own, for a router that asks for one. Raises ConfigError when a file cannot be read.
    """
    files = TlsFiles(ca=_path(ca), certificate=_path(certificate), key=_path(key), flag_prefix="")
    credentials = channel_credentials(files, required=True)
    assert credentials is not None
    return credentials


def _path(name: str | PathLike[str] | None) -> Path | None:
    return None if name is None else Path(name)
