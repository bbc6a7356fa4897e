"""Addresses as people write them: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """Take `host:port` apart, without the brackets. Raises ValueError when it is anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host that has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
