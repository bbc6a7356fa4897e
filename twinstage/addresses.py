"""Addresses as people write them: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations

DEFAULT_PORT = 50051  # of a router


def split_address(address: str) -> tuple[str, int]:
    """Take `host:port` apart, without the brackets. Raises ValueError when it is anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def with_default_port(address: str, port: int) -> str:
    """`address` with `port` where it names a host alone; gRPC's own default is 443, where no router listens.

    Other forms that gRPC knows (`dns:///...`, `unix:...`, lists) are left as they are.
    """
    if "/" in address or "," in address or address.startswith(("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")):
        return address
    if address.startswith("["):
        return f"{address}:{port}" if address.endswith("]") else address
    if address.count(":") > 1:  # an IPv6 host without brackets
        return join_address(address, port)
    return address if ":" in address else f"{address}:{port}"


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host that has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
