"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


async def first_of(work: Coroutine[Any, Any, Result], *guards: Coroutine[Any, Any, NoReturn]) -> Result:
    """The result of `work`, unless a guard raises before: then that error, and `work` is cancelled.

    Nothing goes on after this returns, however it returns.
    """
    work_task = asyncio.ensure_future(work)
    tasks: list[asyncio.Future[Any]] = [work_task, *map(asyncio.ensure_future, guards)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Work that is done counts even when a guard failed in the same moment.
        return work_task.result() if work_task in done else next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
