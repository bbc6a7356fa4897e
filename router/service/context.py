"""What services read from a gRPC call."""

from __future__ import annotations

from typing import Any


def seconds_left(context: Any) -> float | None:
    """Time until the client's deadline; None when it set none."""
    remaining = context.time_remaining()
    return None if remaining is None else max(0.0, float(remaining))
