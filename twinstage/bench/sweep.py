"""A sweep: the same load at several levels, one after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from twinstage.bench.measure import OnRequest
from twinstage.bench.options import LoadOptions
from twinstage.bench.results import LoadResult
from twinstage.bench.runner import OnProgress, run_load
from twinstage.rpc.access import OPEN_ACCESS, Access

OnLevel = Callable[[LoadOptions, int, int], None]
OnResult = Callable[[LoadResult], None]


def levels(
    options: LoadOptions, *, concurrencies: Sequence[int] = (), rates: Sequence[float] = ()
) -> tuple[LoadOptions, ...]:
    """The options of each level; the options themselves when no levels are given.

    All levels have one prompt seed, so that the prefix that they share is the same; what else their prompts contain
    differs by level, so that no level finds the last one's prompts in a prefix cache.
    """
    seed = random.SystemRandom().getrandbits(31) if options.prompt_seed is None else options.prompt_seed
    options = replace(options, prompt_seed=seed)
    closed = tuple(replace(options, concurrency=number, rate_per_s=None) for number in concurrencies)
    opened = tuple(replace(options, concurrency=None, rate_per_s=rate) for rate in rates)
    return closed + opened or (options,)


async def run_sweep(
    options: LoadOptions,
    *,
    concurrencies: Sequence[int] = (),
    rates: Sequence[float] = (),
    access: Access = OPEN_ACCESS,
    on_level: OnLevel | None = None,
    on_result: OnResult | None = None,
    on_progress: OnProgress | None = None,
    on_request: OnRequest | None = None,
    stop: asyncio.Event | None = None,
) -> list[LoadResult]:
    """Run one level after the other. `on_level` is called with options, number and total before each.

    When `stop` is set, the current level ends with what it has measured, and no other begins. Raises what `run_load`
    raises, at any level; `on_result` has then had the results of those before.
    """
    stop = stop or asyncio.Event()
    results: list[LoadResult] = []
    every = levels(options, concurrencies=concurrencies, rates=rates)
    for number, level in enumerate(every, start=1):
        if on_level is not None:
            on_level(level, number, len(every))
        result = await run_load(
            level,
            access=access,
            on_progress=on_progress,
            on_request=on_request,
            stop=stop,
            namespace=f"level {number}",
        )
        results.append(result)
        if on_result is not None:
            on_result(result)
        if stop.is_set():
            break
    return results
