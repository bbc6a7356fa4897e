"""The flags by which commands reach a router, or any server of the cluster, that speaks TLS or asks for a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinstage.errors import ConfigError

if TYPE_CHECKING:
    from twinstage.client import TwinstageClient
    from twinstage.rpc.access import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFlags:
    """How the connection is secured. The variables are others than those of servers, as their certificates are."""

    tls: Annotated[
        bool, typer.Option("--tls", envvar="TWINSTAGE_CLIENT_TLS", help="Use TLS, with the CAs that gRPC trusts.")
    ] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="TWINSTAGE_CLIENT_TLS_CA", help="Use TLS, with the CAs of this PEM file."),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            envvar="TWINSTAGE_CLIENT_TLS_CERTIFICATE",
            help="PEM file with your own certificate, for a server that asks for one.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", envvar="TWINSTAGE_CLIENT_TLS_KEY", help="PEM file with the key of your certificate."),
    ] = None
    tls_name: Annotated[
        str,
        typer.Option(
            "--tls-name",
            envvar="TWINSTAGE_CLIENT_TLS_NAME",
            help="Name in the server's certificate, where it is not the host of its address.",
        ),
    ] = ""
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", envvar="TWINSTAGE_CLIENT_TOKEN_FILE", help="File with the token to send; it is one line."
        ),
    ] = None

    def access(self) -> Access:
        """Raises ConfigError when a file cannot be read, or a name is given without TLS."""
        from twinstage.rpc.access import Access
        from twinstage.rpc.tls import TlsFiles, channel_credentials

        files = TlsFiles(certificate=self.tls_certificate, key=self.tls_key, ca=self.tls_ca)
        credentials = channel_credentials(files, required=self.tls)
        if self.tls_name and credentials is None:
            raise ConfigError("--tls-name needs --tls, or --tls-ca")
        return Access(credentials=credentials, token=self._token(), server_name=self.tls_name)

    def client(self, address: str) -> TwinstageClient:
        """A client of the router at `address`. Raises ConfigError."""
        from twinstage.client import TwinstageClient

        access = self.access()
        return TwinstageClient(
            address,
            credentials=access.credentials,
            token=access.token,
            server_name=access.server_name,
            retries=0,  # who types a command sees at once what the router says
        )

    def _token(self) -> str:
        if self.token_file is None:
            return ""
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {self.token_file}: {getattr(error, 'strerror', 'is no text')}") from error
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(f"--token-file {self.token_file}: needs one line of visible ASCII characters")
        return token
