"""How a process of ours starts and ends: its parent, signals, what the start left behind, and an end that comes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from twinstage.errors import ConfigError
from twinstage.telemetry.log import get_logger

logger = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
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


def stop_at_once_while_starting() -> None:
    """Let SIGTERM and SIGINT end the process with exit code 0, as it serves nobody yet, until others handle them."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stopped_while_starting)


def end_at_next_signal() -> None:
    """From now on, SIGTERM or SIGINT ends the process at once: it was told to stop before. Main thread only."""
    for number in STOP_SIGNALS:
        signal.signal(number, end_now)


def end_now(number: int, _frame: FrameType | None = None) -> NoReturn:
    """End the process as if signal `number` had killed it: exit code 128 + number, nothing is waited for.

    What it shared with others they get back from the kernel, as they do when it crashes.
    """
    logger.warning("ending at once", signal=signal.Signals(number).name)
    _exit(128 + number)


def end_within(timeout_s: float, *, exit_code: int) -> None:
    """See to it that the process ends within `timeout_s`, with this exit code if it does not end by itself.

    Nothing can interrupt a thread that renders an endless template or looks up a name, and the interpreter would wait
    for it.
    """

    def end() -> None:
        names = [thread.name for thread in threading.enumerate() if not thread.daemon]
        logger.warning("ended without waiting any longer", threads=names, waited_s=timeout_s)
        _exit(exit_code)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True  # of itself it keeps nobody waiting
    timer.start()


def _stopped_while_starting(number: int, _frame: FrameType | None) -> NoReturn:
    logger.info("stopped while starting", signal=signal.Signals(number).name)
    _exit(0)


def _exit(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)
