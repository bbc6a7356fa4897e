"""The rows, in the order of the table. Each name is a module here with a `ROW`."""

from __future__ import annotations

import importlib

from bench.row import Row

ROW_NAMES = (
    "prefill",
    "decode",
    "served",
    "first_token",
    "gaps",
    "encode_beside",
    "transfer",
    "prefix",
    "router",
    "start",
    "recovery",
    "memory",
    "quality",
    "concurrency",
    "growth",
    "overload",
    "deterministic",
    "speculative",
    "encode",
)


def load_row(name: str) -> Row:
    """Raises KeyError when there is no such row."""
    if name not in ROW_NAMES:
        raise KeyError(name)
    row: Row = importlib.import_module(f"bench.rows.{name}").ROW
    return row
