"""Just enough of a router to drive one pair of real workers, and to see what a router's clients do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from harness import RoleProcess
from twinstage.engine.llm import LLM, GenerationLimits
from twinstage.errors import Unavailable
from twinstage.rpc.clients import DecodeSession, WorkerConnection
from twinstage.types import (
    Finish,
    KvGrant,
    ProducedToken,
    RequestId,
    SamplingParameters,
    SequenceSpec,
    WorkerLoad,
)


@dataclass(eq=False)
class SmallRouter:
    """Just enough of a router to drive one pair of workers."""

    prefill: WorkerConnection
    decode: WorkerConnection
    prefill_over_tcp: WorkerConnection
    session: DecodeSession
    run: asyncio.Task[None]
    through: Callable[[KvGrant], KvGrant] = lambda grant: grant  # where grants lead

    def prefill_by(self, transport: str) -> WorkerConnection:
        return self.prefill_over_tcp if transport == "tcp" else self.prefill

    async def load(self, worker: WorkerConnection) -> WorkerLoad:
        loads = worker.watch_load(interval_s=5.0)
        try:
            return await anext(loads)
        finally:
            await loads.aclose()  # type: ignore[attr-defined]

    async def all_blocks_free(self) -> None:
        """Wait until both workers hold nothing; the load is pushed, so nothing is polled."""
        for worker in (self.prefill, self.decode, self.prefill_over_tcp):
            async with asyncio.timeout(15):
                total = (await worker.describe(timeout_s=5.0)).total_kv_blocks
                loads = worker.watch_load(interval_s=1.0)
                async for load in loads:
                    assert load.leaked_kv_blocks == 0
                    if load.free_kv_blocks == total and not load.unfinished:
                        break
                await loads.aclose()  # type: ignore[attr-defined]

    async def prefill_with(self, spec: SequenceSpec, grant: KvGrant) -> None:
        """Prefill and hand over."""
        with self.prefill.prefill(spec, grant, timeout_s=30.0) as call:
            await call.first_token()
            await call.handed_over()

    async def generate(self, spec: SequenceSpec, *, transport: str = "shm", give_after_s: float = 0.0) -> Generation:
        """One request through both workers; the grant is held back for `give_after_s` seconds."""
        generation = Generation()
        with self.session.subscribe(spec.request_id) as subscription:
            prefill = self.prefill_by(transport)
            with prefill.prefill(spec, None, timeout_s=30.0, grant_follows=True) as call:
                grant, _ = await self.session.reserve(spec, deadline_s=30.0)
                generation.cached_on_decode = grant.num_cached_blocks
                await asyncio.sleep(give_after_s)
                call.give(self.through(grant))
                first = await call.first_token()
                generation.cached_prompt_tokens = first.cached_prompt_tokens
                (chunk,) = first.chunks
                generation.add(chunk.tokens, chunk.finish)
                if chunk.finish is not None:
                    return generation
                handed_over = await call.handed_over()
            generation.transport, generation.kv_bytes = handed_over.transport, handed_over.kv_bytes
            while generation.finish is None:
                update = await subscription.receive()
                for chunk in update.chunks:
                    generation.add(chunk.tokens, chunk.finish)
                if update.totals is not None:
                    generation.kv_bytes_received = update.totals.kv_bytes_received
                    generation.computed_prompt_tokens = update.totals.computed_prompt_tokens
        return generation


@dataclass
class Generation:
    """What came out."""

    tokens: list[ProducedToken] = field(default_factory=list)
    finish: Finish | None = None
    transport: str = ""
    kv_bytes: int = 0
    kv_bytes_received: int = 0
    computed_prompt_tokens: int = -1
    cached_prompt_tokens: int = -1
    cached_on_decode: int = -1  # blocks

    def add(self, tokens: tuple[ProducedToken, ...], finish: Finish | None) -> None:
        self.tokens += tokens
        self.finish = finish or self.finish

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


@asynccontextmanager
async def small_router(pair: Sequence[RoleProcess]) -> AsyncIterator[SmallRouter]:
    connections = [WorkerConnection(role.address) for role in pair]
    prefill, decode, prefill_over_tcp = connections[0], connections[1], connections[-1]
    session = await decode.open_session(timeout_s=10.0)

    async def run() -> None:
        try:
            await session.run()
        except Unavailable:
            return  # closed by the test or by the worker

    task = asyncio.create_task(run())
    try:
        yield SmallRouter(prefill=prefill, decode=decode, prefill_over_tcp=prefill_over_tcp, session=session, run=task)
    finally:
        session.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for connection in connections:
            await connection.close()


def spec_of(
    name: str,
    length: int,
    *,
    max_tokens: int = 24,
    sampling: SamplingParameters | None = None,
    stop: frozenset[int] = frozenset(),
    logprobs: int | None = None,
) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(name),
        prompt_token_ids=tuple((17 * index + 5 * length + 3) % 380 + 3 for index in range(length)),
        sampling=sampling or SamplingParameters(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=stop,
        logprobs=logprobs,
    )


def in_single_precision(token: ProducedToken) -> ProducedToken:
    """As it is after a journey: log probabilities travel as float32."""
    assert token.logprobs is not None
    top = tuple(replace(entry, logprob=float(np.float32(entry.logprob))) for entry in token.logprobs.top)
    logprob = float(np.float32(token.logprobs.logprob))
    return replace(token, logprobs=replace(token.logprobs, logprob=logprob, top=top))


def expected_of(reference: LLM, spec: SequenceSpec) -> tuple[tuple[ProducedToken, ...], Finish]:
    limits = GenerationLimits(max_tokens=spec.max_tokens, stop_token_ids=spec.stop_token_ids, ignore_eos=True)
    (result,) = reference.generate([spec.prompt_token_ids], spec.sampling, limits=limits, logprobs=spec.logprobs)
    return result.tokens, result.finish
