"""Several pieces of work at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from twinstage.errors import TwinstageError

Result = TypeVar("Result")


async def run_together(work: Sequence[Coroutine[None, None, Result]], *, at_once: int) -> list[Result]:
    """The results in order; at most `at_once` run at the same time.

    Raises what the first one that failed raised, once all others have ended; they are cancelled.
    """
    if len(work) == 1:
        return [await work[0]]
    places = asyncio.Semaphore(at_once)

    async def run(one: Coroutine[None, None, Result]) -> Result:
        async with places:
            return await one

    try:
        return await _all_or_none([asyncio.create_task(run(one)) for one in work])
    finally:
        for one in work:
            one.close()  # what was cancelled before it began; all else has ended


async def _all_or_none(tasks: Sequence[asyncio.Task[Result]]) -> list[Result]:
    """What all tasks return, or an exception once all have ended.

    A caller that is cancelled gets CancelledError in any case. Of an asyncio.TaskGroup it would not, before Python
    3.13, when a task fails in the same moment; and a caller that works in a loop would go on for ever.
    """
    if not tasks:
        return []
    failed: list[asyncio.Task[Result]] = []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if _error_of(task) is not None]
    finally:
        await _end(tasks)
    if failed:
        raise _first([error for task in failed if (error := _error_of(task)) is not None])
    return [task.result() for task in tasks]


async def _end(tasks: Sequence[asyncio.Task[Result]]) -> None:
    """Cancel what goes on, and return when nothing does. To be cancelled meanwhile is put off until then."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while going_on := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(going_on)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        _error_of(task)  # has been seen, so that nobody logs it
    if cancelled is not None:
        raise cancelled


def _error_of(task: asyncio.Task[Result]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _first(errors: Sequence[BaseException]) -> BaseException:
    """What to tell of several failures: an error of ours rather than a bug's, and of those the first."""
    return next((error for error in errors if isinstance(error, TwinstageError)), errors[0])
