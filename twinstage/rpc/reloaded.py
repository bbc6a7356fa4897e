"""Files that are read again once they have changed: certificates, tokens and secrets, which are replaced while we run.

Who needs what they say asks for it each time, and then they are looked at, at most once in LOOK_INTERVAL_S. A new file
that cannot be used, or one that is gone, changes nothing: whoever could call before still can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from twinstage.errors import ConfigError
from twinstage.telemetry.log import get_logger

LOOK_INTERVAL_S = 1.0

logger = get_logger(__name__)

Value = TypeVar("Value")
_Stamp = tuple[int, int, int, int]


class Reloaded(Generic[Value]):
    """What some files say now. For any thread."""

    def __init__(
        self,
        paths: Sequence[Path | None],
        read: Callable[[], Value],
        *,
        on_change: Callable[[Value], None] | None = None,
    ) -> None:
        """Read them for the first time. `on_change` gets each later value before anybody else.

        Raises ConfigError, as `read` does.
        """
        self._paths = [path for path in paths if path is not None]
        self._read = read
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stamps = self._stamps_now()  # before they are read: what changes meanwhile is read again
        self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
        self._value = read()

    def current(self) -> Value:
        """The value of the files as they were a moment ago, or of the last ones that could be used."""
        if time.monotonic() >= self._next_look_s:
            with self._lock:
                self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
                self._look()
        return self._value

    def _look(self) -> None:
        stamps = self._stamps_now()
        if stamps is None or stamps == self._stamps:
            return
        self._stamps = stamps
        files = [str(path) for path in self._paths]
        try:
            value = self._read()
        except (ConfigError, OSError) as error:
            advice = "what they said before goes on to hold; put them right, and they are read again"
            logger.error("changed files cannot be used", files=files, error=str(error), advice=advice)
            return
        if self._on_change is not None:
            self._on_change(value)
        self._value = value
        logger.info("changed files were read again", files=files)

    def _stamps_now(self) -> list[_Stamp] | None:
        """What tells that a file is another one; None when one is gone, as while it is being replaced."""
        try:
            states = [path.stat() for path in self._paths]
        except OSError:
            return None
        return [(state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]
