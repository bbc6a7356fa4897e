"""Results as JSON documents, one a line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import Enum
from typing import Any

from twinstage.client import GenerationStream
from twinstage.types import Finish


def show_json(stream: GenerationStream) -> None:
    """Wait for a whole answer and print it."""
    finish: Finish | None = None
    for delta in stream:
        finish = delta.finish or finish
    message = stream.message()
    parts = {name: value for name in ("reasoning", "tool_calls") if (value := getattr(message, name))}
    info = {"prompt_info": stream.prompt_info, "summary": stream.summary}
    print_json({"text": message.content, **parts, "finish": finish, **info})


def print_json(value: Any) -> None:
    json.dump(_plain(value), sys.stdout, ensure_ascii=False)
    print(flush=True)


def _plain(value: Any) -> Any:
    """The value as JSON types: dataclasses as objects, enumerations as their values."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        return _plain(asdict(value))
    return value
