"""Processes that ours start to have something done apart: modules of ours, in the same interpreter.

`start_bare` is for what nobody vouches for: the child gets no environment, in which there may be secrets, and its words
come by a pipe.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable

from twinstage.errors import Overloaded

NEEDED_TO_START = ("LD_LIBRARY_PATH",)  # what Python itself may need of the environment


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module; the present directory is not among the places where it looks for others."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_path() -> dict[str, str]:
    """The variable by which a child finds the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def start_bare(module: str, *, keeps: Iterable[str] = ()) -> Process:
    """Start `module` with pipes for input and output, and of the environment what it needs to start and `keeps`.

    Raises Overloaded when the machine has no room for another process.
    """
    kept = {name: os.environ[name] for name in (*NEEDED_TO_START, *keeps) if name in os.environ}
    try:
        return await asyncio.create_subprocess_exec(
            *command_of(module), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=kept | module_path(), cwd="/"
        )
    except OSError as error:
        raise Overloaded(f"no process could be started: {error.strerror or error}; try again") from error
