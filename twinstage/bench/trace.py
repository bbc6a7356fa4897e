"""Traces of real requests, in the format of Mooncake's: a JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds, lengths in tokens; `hash_ids` has one id for each 512 tokens of the prompt, equal where
the prompts up to there are equal. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinstage.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One request: when, in seconds from the first; how long; which blocks. `block_ids` is empty without hash_ids."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceEntry]:
    """The first `limit` requests of a trace. Raises ConfigError naming the file and line that cannot be used."""
    entries: list[TraceEntry] = []
    try:
        with path.open(encoding="utf-8") as file:
            for entry in _entries(file, path):
                entries.append(entry)
                if len(entries) == limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: cannot read {path}: {error}") from error
    if not entries:
        raise ConfigError(f"--trace: {path} has no requests; expected a JSON object on each line")
    return entries


def _entries(lines: Iterator[str], path: Path) -> Iterator[TraceEntry]:
    first_ms: float | None = None
    last_ms = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            timestamp_ms, entry = _parse(line, first_ms)
            if timestamp_ms < last_ms:
                raise ValueError(f"timestamp {timestamp_ms:g} comes after {last_ms:g}; sort the trace by timestamp")
        except ValueError as error:
            raise ConfigError(f"--trace: {path}, line {number}: {error}") from error
        first_ms, last_ms = timestamp_ms if first_ms is None else first_ms, timestamp_ms
        yield entry


def _parse(line: str, first_ms: float | None) -> tuple[float, TraceEntry]:
    """The timestamp and the request in a line. Raises ValueError in words."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, not {line.strip()[:80]}")
    timestamp_ms = value.get("timestamp")
    if isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, (int, float)) or not 0 <= timestamp_ms < 1e15:
        raise ValueError(f"timestamp must be milliseconds, not {timestamp_ms!r}")
    prompt_tokens, output_tokens = _length(value, "input_length"), _length(value, "output_length")
    entry = TraceEntry(
        offset_s=(timestamp_ms - (timestamp_ms if first_ms is None else first_ms)) / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_ids=_block_ids(value, prompt_tokens),
    )
    return float(timestamp_ms), entry


def _length(value: dict[str, Any], name: str) -> int:
    length = value.get(name)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{name} must be a whole number of tokens of at least 1, not {length!r}")
    return length


def _block_ids(value: dict[str, Any], prompt_tokens: int) -> tuple[int, ...]:
    block_ids = value.get("hash_ids", [])
    if not isinstance(block_ids, list) or not all(type(entry) is int for entry in block_ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if block_ids and len(block_ids) != needed:
        raise ValueError(f"hash_ids has {len(block_ids)} entries; {prompt_tokens} tokens have {needed} blocks of 512")
    return tuple(block_ids)
