"""TLS: certificates from files, for servers and for channels.

    TlsFiles             the files, whichever end they are for; `server_tls` makes a server's credentials of them
    channel_credentials  the CA that a server's certificate must be of, and the client's own certificate if one is asked

gRPC takes any bytes for a certificate and then fails every handshake without a word, so the files are tried here first.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from twinstage.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: one's own certificate chain and its key, and the CA certificates that the other side must be of.

    `flag_prefix` is how the flags begin that named them ("--tls-"), for messages.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    flag_prefix: str = "--tls-"
    ca_flag: str = "ca"

    @property
    def paths(self) -> tuple[Path | None, ...]:
        """All of them."""
        return self.certificate, self.key, self.ca

    def read_pair(self) -> tuple[bytes, bytes] | None:
        """Key and certificate chain; None when neither is named. Raises ConfigError."""
        if self.certificate is None and self.key is None:
            return None
        if self.certificate is None or self.key is None:
            raise ConfigError(f"{self.flag_prefix}certificate and {self.flag_prefix}key: name both, or neither")
        certificate = _read(self.certificate, f"{self.flag_prefix}certificate")
        key = _read(self.key, f"{self.flag_prefix}key")
        try:
            # The password is for encrypted keys: gRPC cannot read those, and a prompt would stop the process.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{self.flag_prefix}certificate {self.certificate} and {self.flag_prefix}key {self.key} are no PEM "
                f"certificate with its unencrypted key: {_reason(error)}"
            ) from error
        return key, certificate

    def read_ca(self) -> bytes | None:
        """The CA certificates; None when none are named. Raises ConfigError."""
        if self.ca is None:
            return None
        flag = self.flag_prefix + self.ca_flag
        authorities = _read(self.ca, flag)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"{flag} {self.ca} has no PEM certificate: {_reason(error)}") from error
        return authorities


def channel_credentials(files: TlsFiles, *, required: bool = False) -> grpc.ChannelCredentials | None:
    """The credentials of a channel; None when no file is named, unless TLS is `required`. Raises ConfigError.

    Without a CA, those count that gRPC itself trusts.
    """
    pair, ca = files.read_pair(), files.read_ca()
    if pair is None and ca is None and not required:
        return None
    key, certificate = pair or (None, None)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error).replace("_", " ").lower()
