"""A router without its services, on workers without a model: requests go in, events come out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fake_workers import FakeCluster, expected_token, until
from router.admission import Admission
from router.discovery import parse_source
from router.failover import FailoverPolicy
from router.gate import Gate
from router.generation import Deadlines, Generation
from router.live import LiveRequests
from router.outbox import DeltaEvent, Event, FinishEvent, SummaryEvent
from router.poison import PoisonBook
from router.workers import WorkerTable
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import (
    Finish,
    RawGenerationRequest,
    RawSampling,
    RawStopping,
    RequestId,
    SamplingParameters,
    SequenceSpec,
    TextPrompt,
)

PROMPT = "hello"


@dataclass
class Rig:
    """A router without its services, on fake workers."""

    cluster: FakeCluster
    workers: WorkerTable
    generation: Generation
    live: LiveRequests

    async def collect(self, raw: RawGenerationRequest, **options: object) -> Answer:
        return await collect(self.generation, raw, **options)


@dataclass
class Answer:
    events: list[Event]

    def text_of(self, index: int) -> str:
        return "".join(event.text for event in self.events if isinstance(event, DeltaEvent) and event.index == index)

    def finish_of(self, index: int) -> Finish:
        """The end of one continuation, which has exactly one."""
        (event,) = (event for event in self.events if isinstance(event, FinishEvent) and event.index == index)
        return event.finish

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, DeltaEvent))

    @property
    def token_ids(self) -> list[int]:
        deltas = [event for event in self.events if isinstance(event, DeltaEvent)]
        return [token.token_id for delta in deltas for token in delta.tokens]

    @property
    def finish(self) -> FinishEvent:
        return next(event for event in self.events if isinstance(event, FinishEvent))

    @property
    def summary(self) -> SummaryEvent:
        assert isinstance(self.events[-1], SummaryEvent)
        return self.events[-1]


async def collect(
    generation: Generation, raw: RawGenerationRequest, *, timeout_s: float | None = 20.0, is_streamed: bool = True
) -> Answer:
    async with generation.open(raw, timeout_s=timeout_s, is_streamed=is_streamed) as call:
        return Answer([event async for event in call.outbox.events()])


def request(max_tokens: int = 8, **changes: object) -> RawGenerationRequest:
    stopping = RawStopping(max_tokens=max_tokens)
    values = {"prompt": TextPrompt(text=PROMPT), "stopping": stopping, "sampling": RawSampling(seed=7), **changes}
    return RawGenerationRequest(**values)  # type: ignore[arg-type]


def expected_text(cluster: FakeCluster, count: int, *, choice: int = 0, prompt: str = PROMPT) -> str:
    tokenizer = TextTokenizer(cluster.bundle)
    spec = SequenceSpec(
        request_id=RequestId("x"),
        prompt_token_ids=tuple(tokenizer.encode(prompt)),
        sampling=SamplingParameters(seed=7, choice_index=choice),
        max_tokens=count,
    )
    return tokenizer.decode([expected_token(spec, position) for position in range(count)])


@contextlib.asynccontextmanager
async def running(
    prefill: int = 1, decode: int = 1, max_live: int = 64, policy: FailoverPolicy | None = None, **options: object
) -> AsyncIterator[Rig]:
    async with FakeCluster(prefill=prefill, decode=decode, **options) as cluster:  # type: ignore[arg-type]
        workers = WorkerTable(report_interval_s=0.3)
        workers.start([parse_source(address) for address in cluster.addresses])
        executor = ThreadPoolExecutor(1)
        live = LiveRequests()
        generation = Generation(
            workers=workers,
            admission=Admission(executor),
            gate=Gate(max_live=max_live, max_queued=64),
            live=live,
            deadlines=Deadlines(default_s=30, longest_s=60),
            # What no worker comes back for fails soon.
            policy=policy or FailoverPolicy(worker_wait_s=0.3, resume_wait_s=0.3),
            poison=PoisonBook(120.0),
        )
        try:
            await until(lambda: _all_ready(workers, prefill=prefill, decode=decode), what="all workers ready")
            yield Rig(cluster, workers, generation, live)
            assert not len(live)
            await cluster.assert_idle()
        finally:
            await workers.close()
            executor.shutdown()


def _all_ready(workers: WorkerTable, *, prefill: int, decode: int) -> bool:
    model = workers.models.get("fake")
    return model is not None and (len(model.prefill), len(model.decode)) == (prefill, decode)
