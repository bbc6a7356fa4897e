"""Which Twinstage was measured: its version, and the commit that its files are of."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import twinstage
from bench.engines.launch import ROOT

# What a run writes itself does not make its code another one.
WRITTEN = ("bench/results", "bench/plots", "bench/RESULTS.md")
_LIMIT_S = 10.0


def own_version(root: Path = ROOT) -> str:
    """Such as "1.2.3 (0a1b2c3)"; "+" after the commit when files differ from it, or new ones are there."""
    try:
        commit = _git(root, ["rev-parse", "--short", "HEAD"])
        changed = _git(root, ["status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in WRITTEN)])
    except (OSError, subprocess.SubprocessError):
        return f"{twinstage.__version__} (commit unknown)"
    return f"{twinstage.__version__} ({commit}{'+' if changed else ''})"


def _git(root: Path, command: Sequence[str]) -> str:
    done = subprocess.run(
        ["git", *command],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()
