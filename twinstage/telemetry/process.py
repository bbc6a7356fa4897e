"""What a process does about the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from twinstage.errors import ConfigError

EXIT_WITH_PARENT = "TWINSTAGE_EXIT_WITH_PARENT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def exit_with_parent_if_asked() -> None:
    """Ask the kernel for SIGTERM at the death of the parent, when `TWINSTAGE_EXIT_WITH_PARENT` is 1.

    A launcher that is killed cannot stop its children itself. Linux only; elsewhere nothing happens. Raises ConfigError
    when the kernel refuses, and SystemExit when the parent has already gone.
    """
    if os.environ.get(EXIT_WITH_PARENT) != "1" or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise ConfigError(f"{EXIT_WITH_PARENT}=1, but prctl refused: {os.strerror(number)}")
    if os.getppid() != parent:  # it died between the two calls, so no signal will come
        raise SystemExit(0)
