"""Discovery: the addresses of workers, given one by one or as DNS names.

host:port           one worker
dns:///name:port    one worker per address that the name has, looked up again every few seconds and at every loss
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from twinstage.addresses import join_address
from twinstage.errors import ConfigError
from twinstage.telemetry.log import get_logger

DNS_SCHEME = "dns:///"
MIN_LOOKUP_INTERVAL_S = 0.25  # losses come in bursts; one look-up serves them all

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSource:
    """One `--workers` value: an address, or a DNS name behind which there are any number of them."""

    host: str
    port: int
    is_dns_name: bool

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def parse_source(value: str) -> WorkerSource:
    """Read `host:port` or `dns:///name:port`. Raises ConfigError."""
    is_dns_name = value.startswith(DNS_SCHEME)
    host, colon, port = value.removeprefix(DNS_SCHEME).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536) or not _may_be_host(host):
        raise ConfigError(f"--workers {value}: must be host:port or dns:///name:port")
    return WorkerSource(host=host, port=int(port), is_dns_name=is_dns_name)


def _may_be_host(host: str) -> bool:
    """Whether this can be looked up at all: a label that is empty or too long would fail every look-up."""
    try:
        return bool(host) and "/" not in host and bool(host.encode("idna"))
    except UnicodeError:
        return False


async def look_up(source: WorkerSource) -> frozenset[str]:
    """Every address that a DNS name has now. Raises OSError when the look-up fails."""
    records = await asyncio.get_running_loop().getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
    return frozenset(join_address(str(record[4][0]), source.port) for record in records)


class NameWatcher:
    """Follows one DNS name and tells which addresses it has."""

    def __init__(
        self, source: WorkerSource, *, interval_s: float, on_addresses: Callable[[frozenset[str]], None]
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._on_addresses = on_addresses
        self._asked = asyncio.Event()
        self._failed = False

    def look_again(self) -> None:
        """A worker behind the name was lost: look it up now rather than at the next interval."""
        self._asked.set()

    async def run(self) -> None:
        """Look up, tell, wait; for ever."""
        while True:
            self._asked.clear()
            try:
                await self._look_up()
            except Exception:  # the outermost frame of this task: a bug must not end the watch over a name
                logger.exception("look-up failed unexpectedly", name=self._source.host)
            await asyncio.sleep(MIN_LOOKUP_INTERVAL_S)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass

    async def _look_up(self) -> None:
        try:
            addresses = await look_up(self._source)
        except OSError as error:
            # What is known stays: a name server that is away for a moment must not take the workers along.
            if not self._failed:
                logger.warning("look-up failed", name=self._source.host, error=str(error))
            self._failed = True
            return
        self._failed = False
        self._on_addresses(addresses)
