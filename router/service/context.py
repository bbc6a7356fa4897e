"""What services read from a gRPC call."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from twinstage.rpc.callers import current_caller

CALLER_METADATA_KEY = "x-caller"
MAX_CALLER_CHARACTERS = 64

# As gRPC writes who is at the other end: ipv4:192.0.2.7:54321, or ipv6:%5B2001:db8::7%5D:54321.
_PEER = re.compile(r"(?:ipv4:(?P<ipv4>[^:]+)|ipv6:\[(?P<ipv6>[^\]]+)\]):\d+")


def seconds_left(context: Any) -> float | None:
    """Time until the client's deadline; None when it set none."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, float(remaining))


def caller_of(context: Any) -> str:
    """Among whom the router's time is shared: the owner of the token, where callers need one.

    Else who the call says it comes from (`x-caller`), as nobody is trusted less than others there, or its host.
    """
    if caller := current_caller():
        return caller
    for key, value in context.invocation_metadata() or ():
        if key == CALLER_METADATA_KEY and value:
            return str(value)[:MAX_CALLER_CHARACTERS]
    return host_of(context.peer())


def host_of(peer: str) -> str:
    """The host's address alone, as `--caller-weights` names it: 192.0.2.7, 2001:db8::7. What is no IP stays whole."""
    match = _PEER.fullmatch(unquote(peer))
    return (match["ipv4"] or match["ipv6"]) if match else peer
