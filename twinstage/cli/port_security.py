"""Who may call the router of a local cluster: TLS and tokens on its port.

Workers of such a cluster listen on loopback in plain text, behind a secret; variables that are meant for the port of
the router must not reach them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSecurity:
    """PEM files of the port, and the file of callers; the fields are named as the router's flags."""

    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens_file: Path | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Those of the router."""
        named = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        given = [(name, path) for name, path in named if path is not None]
        return tuple(word for name, path in given for word in (f"--{name.replace('_', '-')}", str(path)))

    @property
    def variables(self) -> frozenset[str]:
        """The environment variables of the same meaning."""
        return frozenset(f"TWINSTAGE_{field.name.upper()}" for field in dataclasses.fields(self))

    def check(self) -> None:
        """Raises ConfigError for files that the router would refuse, before models are loaded for nothing."""
        if self == OPEN_PORT:
            return
        from twinstage.rpc.callers import read_callers
        from twinstage.rpc.server_tls import server_credentials
        from twinstage.rpc.tls import TlsFiles

        server_credentials(
            TlsFiles(certificate=self.tls_certificate, key=self.tls_key, ca=self.tls_client_ca, ca_flag="client-ca")
        )
        if self.tokens_file is not None:
            read_callers(self.tokens_file, flag="--tokens-file")


OPEN_PORT = PortSecurity()
