"""The JSON document of one or more load runs: writing it, and reading one back to compare with."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinstage import __version__
from twinstage.bench.options import LoadOptions
from twinstage.bench.results import LoadResult
from twinstage.errors import ConfigError

FORMAT = "twinstage-bench/1"


def document(options: LoadOptions, results: Sequence[LoadResult]) -> dict[str, Any]:
    """Everything about the runs, as JSON types. `options` are those that all runs share."""
    return {
        "format": FORMAT,
        "version": __version__,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "options": plain(dataclasses.asdict(options)),
        "runs": [plain(dataclasses.asdict(result)) for result in results],
    }


def read_document(path: Path) -> dict[str, Any]:
    """A document that `document` made. Raises ConfigError when the file holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("runs"), list):
        raise ConfigError(f"{path} is no result of this version's `twinstage bench --json` ({FORMAT})")
    return value


def plain(value: Any) -> Any:
    """The value as JSON types: enumerations as their values, paths as text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value
