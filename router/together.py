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
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(one)) for one in work]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        for one in work:
            one.close()  # what was cancelled before it began; all else has ended
    return [task.result() for task in tasks]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell of several failures: an error of ours rather than a bug's, and of those the first."""
    errors = [error for error in failures.exceptions if isinstance(error, TwinstageError)]
    return (errors or failures.exceptions)[0]
