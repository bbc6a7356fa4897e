"""A decode worker for tests: the real engine over a stand-in model, and a KV receiver that reports when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from decode_worker.sessions import Session, SessionFailure, SessionMessage, SessionStep
from decode_worker.worker import DecodeWorker
from twinstage.errors import TwinstageError
from twinstage.kv.block_pool import BlockPool
from twinstage.transfer.receiver import TransferDelegate
from twinstage.transfer.values import HandoverCommit, ReceivedBlocks
from twinstage.types import KvEndpoint, KvGrant, RequestId, Role, SamplingParameters, SequenceSpec, WorkerLoad
from worker_parts import VOCABULARY_SIZE, StandInRunner, description, engine_parts, next_token

BLOCK_SIZE = 4
NUM_BLOCKS = 32


@dataclass(eq=False)
class StandInReceiver:
    """Knows what is expected; the test commits, fails and fences."""

    delegate: TransferDelegate
    expected: dict[int, KvGrant] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    revoked: dict[int, Callable[[], None]] = field(default_factory=dict)
    holds_fences: bool = False
    bytes_received: int = 0
    endpoints: tuple[KvEndpoint, ...] = (KvEndpoint(transport="tcp", address=":1", host_id="host"),)

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.fence_all()

    def expect(self, grant: KvGrant) -> None:
        self.expected[grant.transfer_id] = grant

    def revoke(self, transfer_id: int, on_fenced: Callable[[], None]) -> None:
        self.expected.pop(transfer_id, None)
        if self.holds_fences:
            self.revoked[transfer_id] = on_fenced
        else:
            on_fenced()

    def fence_all(self) -> None:
        self.holds_fences = False
        while self.revoked:
            self.revoked.popitem()[1]()


@dataclass(eq=False)
class Bench:
    """A decode worker over stand-ins."""

    worker: DecodeWorker
    receiver: StandInReceiver
    runner: StandInRunner

    async def commit(self, grant: KvGrant, spec: SequenceSpec, *, num_tokens: int | None = None) -> int:
        """Hand `spec` over from another thread, as the channel does. Returns the first token."""
        known = (*spec.prompt_token_ids, *spec.resumed_token_ids)
        token = next_token(known)
        commit = HandoverCommit(
            request_id=spec.request_id,
            num_tokens=len(known) if num_tokens is None else num_tokens,
            first_tokens=((0, token),),
        )
        received = ReceivedBlocks(kv_bytes=1000, num_blocks=len(grant.block_ids), transport="tcp")
        if grant.transfer_id not in self.receiver.opened:
            await self.open(grant)
        await asyncio.to_thread(self.receiver.delegate.committed, grant.transfer_id, commit, received)
        return token

    async def open(self, grant: KvGrant) -> None:
        """A prefill worker comes to fill the grant."""
        self.receiver.opened.add(grant.transfer_id)
        await asyncio.to_thread(self.receiver.delegate.opened, grant.transfer_id)

    @property
    def pool(self) -> BlockPool:
        return self.worker._parts.pool

    async def load(self) -> WorkerLoad:
        return await anext(self.worker.loads.watch(1.0))

    async def free_blocks(self) -> int:
        return (await self.load()).free_kv_blocks

    async def all_blocks_free(self) -> None:
        async with asyncio.timeout(10):
            await self.worker.wait_idle()
        assert await self.free_blocks() == self.worker.description.total_kv_blocks


@asynccontextmanager
async def open_bench(
    *, num_blocks: int = NUM_BLOCKS, max_num_sequences: int = 16, caches: bool = False
) -> AsyncIterator[Bench]:
    runner = StandInRunner()
    parts = engine_parts(
        runner, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_sequences=max_num_sequences, caches=caches
    )
    receivers: list[StandInReceiver] = []

    def open_receiver(delegate: TransferDelegate) -> StandInReceiver:
        receivers.append(StandInReceiver(delegate))
        return receivers[0]

    worker = DecodeWorker(
        parts,
        open_receiver=open_receiver,  # type: ignore[arg-type]
        description=description(num_blocks=num_blocks, block_size=BLOCK_SIZE, role=Role.DECODE),
        tokenizer_bundle=b"bundle",
        loop=asyncio.get_running_loop(),
    )
    try:
        yield Bench(worker=worker, receiver=receivers[0], runner=runner)
    finally:
        runner.open_gate()
        worker.begin_drain()
        worker.abort_all()
        receivers[0].fence_all()
        async with asyncio.timeout(10):
            await worker.wait_idle()
        assert await asyncio.to_thread(worker.close) == 0


def make_spec(
    length: int = 10, *, request_id: str = "r", max_tokens: int = 8, resumed: tuple[int, ...] = ()
) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(index % VOCABULARY_SIZE for index in range(5, 5 + length)),
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=max_tokens,
        resumed_token_ids=resumed,
    )


async def collect(session: Session, request_id: str = "r") -> tuple[list[int], SessionStep]:
    """The tokens of one request until it finishes, and the step in which it did."""
    return await collect_from(session.messages(), request_id)


async def collect_from(messages: AsyncIterator[SessionMessage], request_id: str = "r") -> tuple[list[int], SessionStep]:
    token_ids: list[int] = []
    async with asyncio.timeout(10):
        async for message in messages:
            assert isinstance(message, SessionStep), message
            for chunk in message.chunks:
                if chunk.request_id == request_id:
                    token_ids += [token.token_id for token in chunk.tokens]
                    if chunk.finish is not None:
                        return token_ids, message
    raise AssertionError("the session ended before the request")


async def failure_of(session: Session) -> TwinstageError:
    async with asyncio.timeout(10):
        async for message in session.messages():
            if isinstance(message, SessionFailure):
                return message.error
    raise AssertionError("the session ended without a failure")
