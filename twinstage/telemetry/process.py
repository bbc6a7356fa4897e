"""What a process does about the process that started it, and about what its own start left behind."""

from __future__ import annotations

import ctypes
import gc
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


def settle_after_start() -> None:
    """Give memory back that only the start needed, and keep the garbage collector away from what lives on.

    Converting or packing a model leaves hundreds of megabytes that are free but still the process's. And the libraries
    of a worker are some hundred thousand objects, which every full collection would look at while tokens wait.
    """
    gc.collect()
    gc.freeze()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if malloc_trim is not None:
        malloc_trim(0)
