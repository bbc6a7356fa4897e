"""What services read from a gRPC call."""

from __future__ import annotations

import re
from typing import Any

from twinstage.rpc.callers import current_caller

CALLER_METADATA_KEY = "x-caller"
MAX_CALLER_CHARACTERS = 64

_PORT = re.compile(r":\d+$")


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
    return _PORT.sub("", context.peer())
