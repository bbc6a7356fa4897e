"""One load run: connect, warm up, send what the plan says when it says so, and sum up.

    prepare (ask the servers, find out how prompts are made) -> warm up -> measure -> LoadResult

`sender.py` sends, `measure.py` counts, `summary.py` sums up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from twinstage.bench.measure import Books, OnRequest
from twinstage.bench.monitor import GeneratorMonitor
from twinstage.bench.openai_target import OpenAiTarget
from twinstage.bench.options import LoadOptions, PromptForm, Protocol
from twinstage.bench.plan import PlannedRequest, Segment, plan
from twinstage.bench.prompts import IdPrompts, TextPrompts, find_text_prompts
from twinstage.bench.results import LoadResult
from twinstage.bench.sender import Sender
from twinstage.bench.summary import Snapshot, snapshot, summarize
from twinstage.bench.target import LoadRequest, ServedModel, Target
from twinstage.bench.trace import TraceEntry, read_trace
from twinstage.bench.twinstage_target import TwinstageTarget
from twinstage.errors import Cancelled, ConfigError
from twinstage.rpc.access import OPEN_ACCESS, Access

PROGRESS_S = 0.5
OnProgress = Callable[[Snapshot], None]
ResultT = TypeVar("ResultT")


async def run_load(
    options: LoadOptions,
    *,
    access: Access = OPEN_ACCESS,
    on_progress: OnProgress | None = None,
    on_request: OnRequest | None = None,
    stop: asyncio.Event | None = None,
    namespace: str = "run",
) -> LoadResult:
    """Do one load run. `access` is how Twinstage routers are reached; it is no part of the options, which are written
    into reports.

    `on_progress` is called twice a second, `on_request` when a request ends; they must be quick. When `stop` is set,
    nothing more is sent, what is in progress is cancelled, and the result covers what was measured so far. Raises
    ConfigError for what the options cannot mean at this server, Unavailable and other TwinstageErrors when it cannot be
    reached, and Cancelled when `stop` is set before anything was sent.
    """
    trace = read_trace(options.trace.path, limit=options.requests) if options.trace is not None else None
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        targets: list[Target] = []
        for address in options.addresses:
            target = _target(options.protocol, address, access)
            stack.push_async_callback(target.close)
            targets.append(target)
        run = await _unless(stop, _prepare(options, targets, trace=trace))
        await _warm_up(run, stop, namespace=f"{namespace}/warm-up")
        return await _measure(run, stop, namespace=namespace, on_progress=on_progress, on_request=on_request)


def _target(protocol: Protocol, address: str, access: Access) -> Target:
    if protocol is Protocol.TWINSTAGE:
        return TwinstageTarget(address, access)
    if access != OPEN_ACCESS:
        raise ConfigError("--tls... and --token-file are for --protocol twinstage")
    return OpenAiTarget(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both phases need."""

    options: LoadOptions
    targets: Sequence[Target]
    model: ServedModel
    prompts: IdPrompts | TextPrompts
    prompt_seed: int
    trace: Sequence[TraceEntry] | None

    def plan(self, options: LoadOptions, namespace: str) -> Iterator[PlannedRequest]:
        return plan(options, namespace=namespace, max_model_len=self.model.max_model_len, trace=self.trace)

    def request(self, planned: PlannedRequest) -> LoadRequest:
        return LoadRequest(
            prompt=self.prompts.make(planned.segments),
            model=self.model.name,
            output_tokens=planned.output_tokens,
            sampling=planned.sampling,
            ignore_eos=self.options.ignore_eos,
            timeout_s=self.options.timeout_s,
        )


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`. Raises Cancelled when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("interrupted before anything was measured")
        return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _prepare(options: LoadOptions, targets: Sequence[Target], *, trace: Sequence[TraceEntry] | None) -> _Run:
    """Ask every server for the model, and find out how prompts are made."""
    models = [await target.model(options.model) for target in targets]
    model = replace(
        models[0],
        max_model_len=options.max_model_len or models[0].max_model_len,
        vocabulary_size=options.vocabulary_size or models[0].vocabulary_size,
    )
    prompt_seed = random.SystemRandom().getrandbits(31) if options.prompt_seed is None else options.prompt_seed
    prompts: IdPrompts | TextPrompts
    if options.prompt_form is PromptForm.TEXT:
        prompts = await find_text_prompts(lambda text: targets[0].count_tokens(text, model.name), seed=prompt_seed)
    elif model.vocabulary_size is None:
        raise ConfigError(
            f"{targets[0].address} does not say how large its vocabulary is; pass --vocabulary-size N to send token "
            "ids, or --prompt-form text"
        )
    else:
        prompts = IdPrompts(vocabulary_size=model.vocabulary_size, seed=prompt_seed)
    return _Run(options=options, targets=targets, model=model, prompts=prompts, prompt_seed=prompt_seed, trace=trace)


async def _warm_up(run: _Run, stop: asyncio.Event, *, namespace: str) -> None:
    """Send the warm-up requests in a closed loop; what is measured of them is dropped."""
    concurrency = run.options.concurrency or run.options.max_in_flight or 1
    number = run.options.warmup_requests
    if number is None:
        number = run.options.concurrency or 1
    if not number:
        return
    options = replace(
        run.options, concurrency=concurrency, rate_per_s=None, max_in_flight=None, requests=number, duration_s=None
    )
    planned = run.plan(options, namespace)
    if run.trace is not None:  # warmed up with as many tokens, but not with the prompts that are measured later
        planned = (replace(entry, segments=_apart(entry, namespace, index)) for index, entry in enumerate(planned))
    books = Books(clock=time.monotonic, slo=options.slo, start_s=time.monotonic())
    await Sender(options, run.targets, books=books, make_request=run.request).run(planned, stop)


def _apart(planned: PlannedRequest, namespace: str, index: int) -> tuple[Segment, ...]:
    return (Segment(f"{namespace}/{index}", planned.prompt_tokens),)


async def _measure(
    run: _Run,
    stop: asyncio.Event,
    *,
    namespace: str,
    on_progress: OnProgress | None,
    on_request: OnRequest | None,
) -> LoadResult:
    planned = run.plan(run.options, namespace)
    started_at = time.time()
    async with GeneratorMonitor() as monitor:
        books = Books(clock=time.monotonic, slo=run.options.slo, start_s=time.monotonic(), on_request=on_request)
        sender = Sender(run.options, run.targets, books=books, make_request=run.request)
        async with _reporting(books, on_progress):
            await sender.run(planned, stop)
        health = monitor.health(books.start_delay.distribution())
    return summarize(
        books,
        options=run.options,
        model=run.model.name,
        prompt_seed=run.prompt_seed,
        started_at=started_at,
        interrupted=stop.is_set(),
        health=health,
    )


@contextlib.asynccontextmanager
async def _reporting(books: Books, on_progress: OnProgress | None) -> AsyncIterator[None]:
    """Call `on_progress` regularly, and once at the end."""
    if on_progress is None:
        yield
        return

    async def report() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            on_progress(snapshot(books))

    task = asyncio.create_task(report(), name="progress")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        on_progress(snapshot(books))
