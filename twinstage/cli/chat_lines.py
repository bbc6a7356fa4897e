"""Where the lines of a conversation come from: a keyboard, with editing and history, or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

HISTORY_LINES = 1000


class PipeLines:
    """Lines of standard input."""

    is_interactive = False

    def read(self, prompt: str) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class KeyboardLines:
    """Lines that are typed, with those of earlier conversations on the arrow keys."""

    is_interactive = True

    def __init__(self, history: Path | None = None) -> None:
        self._history = history or history_path()
        self._readline = _readline()
        if self._readline is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(str(self._history))
            self._readline.set_history_length(HISTORY_LINES)

    def read(self, prompt: str) -> str | None:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return None
        self._save()
        return line

    def _save(self) -> None:
        """Keep the history, for this user's eyes alone; a conversation needs none."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.write_history_file(str(self._history))


def lines_of_this_terminal() -> KeyboardLines | PipeLines:
    return KeyboardLines() if sys.stdin.isatty() and sys.stdout.isatty() else PipeLines()


def history_path() -> Path:
    """Where typed lines are kept."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "twinstage" / "chat_history"


def _readline() -> Any:
    """The module, where Python was built with it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
