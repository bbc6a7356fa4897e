"""JSON as arguments travel: text that a message can hold."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """The value as JSON, characters as they are where they are Unicode. Raises ValueError for infinite numbers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
