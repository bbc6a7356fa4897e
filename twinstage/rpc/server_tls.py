"""The credentials of a server: its certificate and key; with a CA for clients, only those it knows get in.

Apart from `tls`, as clients have no use for what servers import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import grpc

from twinstage.errors import ConfigError
from twinstage.rpc.reloaded import Reloaded
from twinstage.rpc.tls import TlsFiles
from twinstage.settings import ProcessSettings


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """The credentials of a server; None without a certificate. Raises ConfigError.

    The files are looked at again when somebody connects; connections go on with what counted when they began.
    """
    if files.certificate is None and files.key is None:
        if files.ca is not None:
            raise ConfigError(f"{files.flag_prefix}{files.ca_flag} needs {files.flag_prefix}certificate")
        return None
    reloaded = Reloaded(files.paths, lambda: _certificate_configuration(files))
    known = reloaded.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        if (newest := reloaded.current()) is known:
            return None
        known = newest
        return newest

    # Its stub denies what its docstring promises: None leaves everything as it is.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(known, fetch, require_client_authentication=files.ca is not None)


def _certificate_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    pair = files.read_pair()
    assert pair is not None  # else there would be no TLS
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=files.read_ca())


def credentials_of_process(settings: ProcessSettings) -> grpc.ServerCredentials | None:
    """The credentials of a process's own port, as its flags say. Raises ConfigError."""
    files = TlsFiles(
        certificate=settings.tls_certificate, key=settings.tls_key, ca=settings.tls_client_ca, ca_flag="client-ca"
    )
    return server_credentials(files)
