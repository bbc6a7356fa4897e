"""The prefill worker's own parts: the hand-over of a prompt, and every way a request can end.

The engine is the real one over a stand-in model; the KV channel is a stand-in that reports when the test says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from prefill_worker.embedding import EmbeddingWorker
from prefill_worker.events import FirstToken, HandedOver
from prefill_worker.handoff import Handoff
from prefill_worker.service import PrefillServicer, add_services
from prefill_worker.worker import PrefillWorker
from twinstage.engine.core import ComputedChunk
from twinstage.errors import (
    Cancelled,
    ComputeFailed,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvExhausted,
    Overloaded,
    TransferError,
)
from twinstage.rpc.clients import WorkerConnection
from twinstage.rpc.convert_worker import kv_grant_to_proto, sequence_spec_to_proto
from twinstage.rpc.prefill_call import PrefillCall
from twinstage.rpc.server import bind, create_server
from twinstage.rpc.worker_service import Loading
from twinstage.transfer.values import HandoverCommit, HandoverDone, HandoverFailed, TransferOutcome
from twinstage.types import FinishReason, KvGrant, RequestId, SamplingParameters, SequenceSpec, WorkerId
from twinstage.worker.v1 import worker_pb2
from worker_parts import VOCABULARY_SIZE, StandInRunner, description, engine_parts, next_token

BLOCK_SIZE = 4


@dataclass(eq=False)
class StandInTransfer:
    """Records what is written; the test says how it ends."""

    on_result: Callable[[TransferOutcome], None]
    reads_blocks: bool = True
    writes: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    commits: list[HandoverCommit] = field(default_factory=list)
    aborted: threading.Event = field(default_factory=threading.Event)
    committed: threading.Event = field(default_factory=threading.Event)
    holds_result: bool = False
    on_write: Callable[[], None] = lambda: None
    on_commit: Callable[[], None] = lambda: None

    def write(self, source_block_ids: Sequence[int], position: int) -> None:
        self.on_write()
        self.writes.append((tuple(source_block_ids), position))

    def commit(self, commit: HandoverCommit) -> None:
        self.on_commit()
        self.commits.append(commit)
        self.committed.set()

    def abort(self) -> None:
        if not self.aborted.is_set():
            self.aborted.set()
            if not self.holds_result:
                self.end(HandoverFailed(Cancelled("aborted")))

    def end(self, outcome: TransferOutcome) -> None:
        if self.reads_blocks:
            self.reads_blocks = False
            self.on_result(outcome)


@dataclass(eq=False)
class StandInSender:
    transfers: list[StandInTransfer] = field(default_factory=list)
    holds_result: bool = False

    def open(self, grant: KvGrant, on_result: Callable[[TransferOutcome], None]) -> StandInTransfer:
        self.transfers.append(StandInTransfer(on_result=on_result, holds_result=self.holds_result))
        return self.transfers[-1]

    def close(self) -> None:
        pass


def _grant(num_blocks: int) -> KvGrant:
    return KvGrant(
        worker_id=WorkerId("decode"),
        epoch=1,
        transfer_id=7,
        generation=1,
        token=b"t" * 32,
        block_ids=tuple(range(num_blocks)),
        layout_fingerprint="layout",
        endpoints=(),
        lease_s=10.0,
    )


def _spec(
    length: int, *, request_id: str = "r", max_tokens: int = 8, stop: frozenset[int] = frozenset()
) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(index % VOCABULARY_SIZE for index in range(3, 3 + length)),
        sampling=SamplingParameters(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=stop,
    )


@dataclass(eq=False)
class Bench:
    """A prefill worker over stand-ins."""

    worker: PrefillWorker
    sender: StandInSender
    runner: StandInRunner

    async def all_blocks_free(self) -> None:
        async with asyncio.timeout(10):
            await self.worker.wait_idle()
        load = await anext(self.worker.loads.watch(1.0))
        assert load.free_kv_blocks == self.worker.description.total_kv_blocks


@asynccontextmanager
async def _bench(*, num_blocks: int = 32, tokens_per_step: int = 8) -> AsyncIterator[Bench]:
    runner = StandInRunner()
    parts = engine_parts(
        runner, num_blocks=num_blocks, block_size=BLOCK_SIZE, tokens_per_step=tokens_per_step, holds=True
    )
    sender = StandInSender()
    worker = PrefillWorker(
        parts,
        sender=sender,  # type: ignore[arg-type]
        description=description(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        tokenizer_bundle=b"bundle",
        loop=asyncio.get_running_loop(),
    )
    try:
        yield Bench(worker=worker, sender=sender, runner=runner)
    finally:
        runner.open_gate()
        worker.abort_all()
        for transfer in sender.transfers:
            transfer.end(HandoverFailed(Cancelled("the test is over")))
        async with asyncio.timeout(10):
            await worker.wait_idle()
        assert await asyncio.to_thread(worker.close) == 0


# --- the hand-over --------------------------------------------------------------------------------


def _computed(num_computed: int, total: int, blocks: tuple[int, ...]) -> ComputedChunk:
    return ComputedChunk(
        request_id=RequestId("r"), block_ids=blocks, num_computed_tokens=num_computed, total_tokens=total
    )


def test_each_block_is_written_once_when_it_is_complete() -> None:
    transfer = StandInTransfer(on_result=lambda outcome: None)
    handoff = Handoff(transfer, block_size=4)  # type: ignore[arg-type]
    blocks = (10, 11, 12)
    handoff.advance(_computed(3, 10, blocks))
    assert transfer.writes == []
    handoff.advance(_computed(8, 10, blocks))
    assert transfer.writes == [((10, 11), 0)]
    handoff.advance(_computed(10, 10, blocks))
    assert transfer.writes == [((10, 11), 0), ((12,), 2)]


def test_blocks_that_the_decode_worker_has_are_not_written() -> None:
    transfer = StandInTransfer(on_result=lambda outcome: None)
    handoff = Handoff(transfer, block_size=4, num_cached_blocks=2)  # type: ignore[arg-type]
    blocks = (10, 11, 12, 13)
    for computed in (4, 8):
        handoff.advance(_computed(computed, 14, blocks))
        assert transfer.writes == []
    handoff.advance(_computed(12, 14, blocks))
    assert transfer.writes == [((12,), 0)], "positions are those of the grant"
    handoff.advance(_computed(14, 14, blocks))
    assert transfer.writes == [((12,), 0), ((13,), 1)]
    handoff.commit(HandoverCommit(request_id=RequestId("r"), num_tokens=14, first_tokens=((0, 1),)))
    assert len(transfer.commits) == 1


def test_when_the_decode_worker_has_everything_only_the_commit_is_sent() -> None:
    transfer = StandInTransfer(on_result=lambda outcome: None)
    handoff = Handoff(transfer, block_size=4, num_cached_blocks=2)  # type: ignore[arg-type]
    handoff.advance(_computed(8, 8, (10, 11)))
    handoff.commit(HandoverCommit(request_id=RequestId("r"), num_tokens=8, first_tokens=((0, 1),)))
    assert transfer.writes == []
    assert len(transfer.commits) == 1


def test_blocks_that_moved_are_not_mixed_with_those_already_written() -> None:
    transfer = StandInTransfer(on_result=lambda outcome: None)
    handoff = Handoff(transfer, block_size=4)  # type: ignore[arg-type]
    handoff.advance(_computed(4, 8, (10, 11)))
    handoff.advance(_computed(8, 8, (20, 21)))
    handoff.commit(HandoverCommit(request_id=RequestId("r"), num_tokens=8, first_tokens=((0, 1),)))
    assert transfer.writes == [((10,), 0)]
    assert transfer.commits == []
    assert transfer.aborted.is_set()
    assert isinstance(handoff.refusal, TransferError)


def test_nothing_is_written_after_an_abort() -> None:
    transfer = StandInTransfer(on_result=lambda outcome: None)
    handoff = Handoff(transfer, block_size=4)  # type: ignore[arg-type]
    handoff.abort()
    handoff.advance(_computed(4, 4, (10,)))
    handoff.commit(HandoverCommit(request_id=RequestId("r"), num_tokens=4, first_tokens=((0, 1),)))
    assert transfer.writes == []
    assert transfer.commits == []


# --- one request ----------------------------------------------------------------------------------


async def test_a_prompt_is_computed_handed_over_and_freed() -> None:
    async with _bench() as bench:
        spec = _spec(18)
        events = bench.worker.prefill(spec, _grant(5))
        first = await anext(events)
        assert isinstance(first, FirstToken)
        assert first.chunks[0].request_id == "r"
        assert [token.token_id for token in first.chunks[0].tokens] == [next_token(spec.prompt_token_ids)]
        assert first.chunks[0].finish is None
        (transfer,) = bench.sender.transfers
        assert [position for _, position in transfer.writes] == [0, 2], "the last block waits for the first token"
        assert await asyncio.to_thread(transfer.committed.wait, 5)
        assert [position for _, position in transfer.writes] == [0, 2, 4], "two blocks per chunk of 8, then the rest"
        assert sum(len(blocks) for blocks, _ in transfer.writes) == 5
        (commit,) = transfer.commits
        assert (commit.request_id, commit.num_tokens) == ("r", 18)
        assert commit.first_tokens == ((0, first.chunks[0].tokens[0].token_id),)
        transfer.end(HandoverDone(transport="shm", kv_bytes=123, seconds=0.5))
        handed_over = await anext(events)
        assert isinstance(handed_over, HandedOver)
        assert (handed_over.transport, handed_over.kv_bytes) == ("shm", 123)
        assert await anext(events, None) is None
        await bench.all_blocks_free()


async def test_the_source_blocks_stay_until_the_transfer_has_ended() -> None:
    async with _bench() as bench:
        bench.sender.holds_result = True
        async with aclosing(bench.worker.prefill(_spec(18), _grant(5))) as events:
            await anext(events)
        (transfer,) = bench.sender.transfers
        assert transfer.aborted.is_set()
        load = await anext(bench.worker.loads.watch(1.0))
        assert load.free_kv_blocks == 32 - 5, "the channel may still read them"
        transfer.end(HandoverFailed(Cancelled("aborted")))
        await bench.all_blocks_free()


@pytest.mark.parametrize("case", ["max_tokens", "stop"])
async def test_nothing_is_handed_over_when_the_first_token_is_the_last(case: str) -> None:
    async with _bench() as bench:
        spec = _spec(18, max_tokens=1)
        if case == "stop":
            spec = _spec(18, stop=frozenset({next_token(spec.prompt_token_ids)}))
        events = [event async for event in bench.worker.prefill(spec, _grant(5))]
        assert len(events) == 1
        assert isinstance(events[0], FirstToken)
        finish = events[0].chunks[0].finish
        assert finish is not None
        assert finish.reason is (FinishReason.STOP if case == "stop" else FinishReason.LENGTH)
        (transfer,) = bench.sender.transfers
        assert transfer.commits == []
        assert transfer.aborted.is_set()
        await bench.all_blocks_free()


async def test_no_grant_is_needed_for_one_token() -> None:
    async with _bench() as bench:
        events = [event async for event in bench.worker.prefill(_spec(5, max_tokens=1), None)]
        assert len(events) == 1
        assert bench.sender.transfers == []
        await bench.all_blocks_free()


async def test_a_failed_transfer_fails_the_request_and_frees_it() -> None:
    async with _bench() as bench:
        events = bench.worker.prefill(_spec(18), _grant(5))
        await anext(events)
        bench.sender.transfers[0].end(HandoverFailed(TransferError("the peer went away")))
        with pytest.raises(TransferError, match="went away"):
            await anext(events)
        await bench.all_blocks_free()


async def test_a_transfer_that_fails_before_the_first_token_ends_the_prefill() -> None:
    async with _bench() as bench:
        bench.runner.close_gate()
        events = bench.worker.prefill(_spec(18), _grant(5))
        waiting = asyncio.ensure_future(anext(events))
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        bench.sender.transfers[0].end(HandoverFailed(TransferError("no way")))
        with pytest.raises(TransferError):
            await waiting
        bench.runner.open_gate()
        await bench.all_blocks_free()


@pytest.mark.parametrize("ending", ["failure", "last token"])
async def test_the_source_blocks_stay_too_when_the_engine_ends_the_sequence(ending: str) -> None:
    async with _bench() as bench:
        bench.sender.holds_result = True
        if ending == "failure":
            events = bench.worker.prefill(_spec(18), _grant(5))
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            (transfer,) = bench.sender.transfers
            transfer.on_write = bench.runner.fail_next  # blocks are on their way when the second chunk fails
            with pytest.raises(ComputeFailed):
                await reading
        else:
            _ = [event async for event in bench.worker.prefill(_spec(18, max_tokens=1), _grant(5))]
            (transfer,) = bench.sender.transfers
        assert transfer.writes
        assert await asyncio.to_thread(transfer.aborted.wait, 5)
        load = await anext(bench.worker.loads.watch(1.0))
        assert load.free_kv_blocks == 32 - 5, "the channel may still read them"
        transfer.end(HandoverFailed(Cancelled("aborted")))
        await bench.all_blocks_free()


async def test_a_cancelled_prompt_is_computed_no_further_while_its_blocks_are_still_read() -> None:
    async with _bench() as bench:
        bench.sender.holds_result = True
        bench.runner.close_gate()
        events = bench.worker.prefill(_spec(40), _grant(10))
        reading = asyncio.ensure_future(anext(events))
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        bench.runner.open_gate()
        bench.sender.holds_result = False
        other = [event async for event in bench.worker.prefill(_spec(4, max_tokens=1), None)]
        assert len(other) == 1
        assert bench.runner.num_steps == 2, "the chunk that was running, and the other prompt"
        bench.sender.transfers[0].end(HandoverFailed(Cancelled("aborted")))
        await bench.all_blocks_free()


@pytest.mark.parametrize("refused", ["write", "commit"])
async def test_a_hand_over_that_the_channel_refuses_fails_alone(refused: str) -> None:
    def refuse() -> None:
        raise TransferError("the channel has no words for it")

    async with _bench() as bench:
        bench.runner.close_gate()
        blocker = asyncio.ensure_future(anext(bench.worker.prefill(_spec(4, max_tokens=1), None)))
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        streams = [bench.worker.prefill(_spec(4, request_id=name), _grant(1)) for name in ("a", "b")]
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        first, second = bench.sender.transfers
        setattr(first, f"on_{refused}", refuse)
        bench.runner.open_gate()
        await asyncio.gather(blocker, *reading)  # both are computed in the step after
        with pytest.raises(TransferError, match="no words"):
            await anext(streams[0])
        assert await asyncio.to_thread(second.committed.wait, 5)
        second.end(HandoverDone(transport="shm", kv_bytes=1, seconds=0.1))
        assert isinstance(await anext(streams[1]), HandedOver)
        await bench.all_blocks_free()


async def test_a_grant_of_another_size_is_refused_at_the_door() -> None:
    async with _bench() as bench:
        for num_blocks in (4, 6):
            with pytest.raises(InvalidRequest, match="needs 5"):
                await anext(bench.worker.prefill(_spec(18), _grant(num_blocks)))
        assert bench.sender.transfers == []


async def test_a_failed_forward_pass_fails_the_request_and_the_worker_lives() -> None:
    async with _bench() as bench:
        bench.runner.fail_next()
        with pytest.raises(ComputeFailed):
            _ = [event async for event in bench.worker.prefill(_spec(18), _grant(5))]
        assert bench.sender.transfers[0].aborted.is_set()
        await bench.all_blocks_free()
        events = [event async for event in bench.worker.prefill(_spec(5, max_tokens=1), None)]
        assert len(events) == 1


@pytest.mark.parametrize("phase", ["queued", "computing", "sending"])
async def test_a_request_can_be_cancelled_in_every_phase(phase: str) -> None:
    async with _bench(num_blocks=8) as bench:
        if phase != "sending":
            bench.runner.close_gate()
        first = bench.worker.prefill(_spec(24, request_id="first"), _grant(6))
        reading = asyncio.ensure_future(anext(first))
        if phase == "sending":
            await reading
            await first.aclose()
        else:
            assert await asyncio.to_thread(bench.runner.entered.wait, 5)
            victim = first
            if phase == "queued":  # no blocks are left for it
                victim = bench.worker.prefill(_spec(24, request_id="second"), _grant(6))
                reading_victim = asyncio.ensure_future(anext(victim))
                await asyncio.sleep(0)
            else:
                reading_victim = reading
            reading_victim.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading_victim
            bench.runner.open_gate()
            if phase == "queued":
                assert isinstance(await reading, FirstToken)
                await first.aclose()
        await bench.all_blocks_free()


async def test_the_same_id_may_come_again_while_its_old_blocks_are_still_read() -> None:
    async with _bench() as bench:
        bench.sender.holds_result = True
        async with aclosing(bench.worker.prefill(_spec(18), _grant(5))) as events:
            await anext(events)
        async with aclosing(bench.worker.prefill(_spec(18), _grant(5))) as events:
            assert isinstance(await anext(events), FirstToken)
        for transfer in bench.sender.transfers:
            transfer.end(HandoverFailed(Cancelled("aborted")))
        await bench.all_blocks_free()


async def test_nothing_is_computed_or_held_before_the_grant_that_follows() -> None:
    async with _bench() as bench:
        loading: Loading[PrefillWorker | EmbeddingWorker] = Loading()
        loading.set(bench.worker)
        says: asyncio.Queue[worker_pb2.PrefillRequest | None] = asyncio.Queue()

        async def requests() -> AsyncIterator[worker_pb2.PrefillRequest]:
            while (message := await says.get()) is not None:
                yield message

        async def first_event() -> worker_pb2.PrefillResponse:
            async with aclosing(PrefillServicer(loading).Prefill(requests(), None)) as events:  # type: ignore[type-var]
                return await anext(events)

        prompt = worker_pb2.PrefillRequest(sequence=sequence_spec_to_proto(_spec(18)), grant_follows=True)
        for grant in (_grant(5), None):
            says.put_nowait(prompt)
            answer = asyncio.create_task(first_event())
            await asyncio.sleep(0.05)
            assert bench.runner.num_steps == 0
            assert bench.sender.transfers == []
            if grant is None:
                says.put_nowait(None)
                with pytest.raises(InvalidRequest, match="was to follow"):
                    await answer
            else:
                answer.cancel()
        says.put_nowait(prompt)
        says.put_nowait(worker_pb2.PrefillRequest(grant=kv_grant_to_proto(_grant(5))))
        assert (await first_event()).first_token.chunk.tokens[0].id == next_token(_spec(18).prompt_token_ids)


@asynccontextmanager
async def _served(worker: PrefillWorker) -> AsyncIterator[WorkerConnection]:
    """The worker behind a real server."""
    loading: Loading[PrefillWorker | EmbeddingWorker] = Loading()
    loading.set(worker)
    server = create_server()
    add_services(server, loading)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    connection = WorkerConnection(f"127.0.0.1:{port}")
    try:
        yield connection
    finally:
        await connection.close()
        await server.stop(None)


async def _until_unfinished(worker: PrefillWorker, count: int) -> None:
    async with asyncio.timeout(5), aclosing(worker.loads.watch(30.0)) as loads:
        while (await anext(loads)).unfinished != count:
            pass


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_call_without_its_grant_is_the_workers_until_it_drains(
    for_good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_worker.worker.MAX_REQUESTS", 2)
    async with _bench() as bench, _served(bench.worker) as connection, AsyncExitStack() as stack:

        def start() -> PrefillCall:
            call = connection.prefill(_spec(18), None, timeout_s=60, grant_follows=True)
            return stack.enter_context(call)

        async def unfinished() -> int:
            return (await anext(bench.worker.loads.watch(1.0))).unfinished

        async def without_grant(call: PrefillCall) -> None:
            async with asyncio.timeout(5), call.unless_over():
                await asyncio.Event().wait()

        calls = [start(), start()]
        await _until_unfinished(bench.worker, 2)
        with pytest.raises(Overloaded):
            await without_grant(start())
        calls[0].give(_grant(5))
        await calls[0].first_token()
        assert await unfinished() == 2, "one computes and one waits"
        bench.worker.begin_drain(for_good=for_good)
        with pytest.raises(Draining):
            await without_grant(calls[1])
        assert await unfinished() == 1
        with pytest.raises(Draining):
            await without_grant(start())
        bench.sender.transfers[0].end(HandoverDone(transport="tcp", kv_bytes=1, seconds=0.1))
        await calls[0].handed_over()
        await bench.all_blocks_free()


async def test_a_call_that_ends_without_its_grant_leaves_an_idle_worker() -> None:
    async with _bench() as bench, _served(bench.worker) as connection:
        with connection.prefill(_spec(18), None, timeout_s=60, grant_follows=True):
            await _until_unfinished(bench.worker, 1)
            idle = asyncio.create_task(bench.worker.wait_idle())
            await asyncio.sleep(0.05)
            assert not idle.done()
        async with asyncio.timeout(5):
            await idle


async def test_a_request_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.service.REQUEST_TIMEOUT_S", 0.05)

    async def silent() -> AsyncIterator[worker_pb2.PrefillRequest]:
        await asyncio.Event().wait()
        yield worker_pb2.PrefillRequest()

    async with _bench() as bench:
        loading: Loading[PrefillWorker | EmbeddingWorker] = Loading()
        loading.set(bench.worker)
        async with asyncio.timeout(5):
            with pytest.raises(DeadlineExceeded, match="no request"):
                await anext(PrefillServicer(loading).Prefill(silent(), None))


async def test_what_cannot_be_computed_is_refused_at_the_door() -> None:
    async with _bench(num_blocks=4) as bench:
        for spec, error in [
            (_spec(0), InvalidRequest),
            (_spec(1000), InvalidRequest),
            (_spec(17), KvExhausted),
            (_spec(4, max_tokens=0), InvalidRequest),
        ]:
            with pytest.raises(error):
                await anext(bench.worker.prefill(spec, _grant(5)))
        wrong = SequenceSpec(
            request_id=RequestId("r"),
            prompt_token_ids=(1, VOCABULARY_SIZE),
            sampling=SamplingParameters(),
            max_tokens=3,
        )
        with pytest.raises(InvalidRequest, match="token ids from 0 to"):
            await anext(bench.worker.prefill(wrong, _grant(1)))
        assert bench.sender.transfers == []
        await bench.all_blocks_free()


async def test_requests_are_bounded_and_cancelled_ones_leave_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that were given up while a step ran are not computed, and make room for others."""
    monkeypatch.setattr("prefill_worker.worker.MAX_REQUESTS", 20)
    async with _bench(num_blocks=8) as bench:
        bench.runner.close_gate()
        calls = [bench.worker.prefill(_spec(8, max_tokens=1, request_id=f"r{number}"), None) for number in range(20)]
        reading = [asyncio.ensure_future(anext(call)) for call in calls]
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        with pytest.raises(Overloaded):
            await anext(bench.worker.prefill(_spec(8, max_tokens=1, request_id="too many"), None))
        for task in reading[1:]:
            task.cancel()
        await asyncio.gather(*reading[1:], return_exceptions=True)
        bench.runner.open_gate()
        assert isinstance(await reading[0], FirstToken)
        async with asyncio.timeout(5):
            await bench.worker.wait_idle()
        last = [event async for event in bench.worker.prefill(_spec(8, max_tokens=1, request_id="last"), None)]
        assert len(last) == 1
        assert bench.runner.num_steps == 2, "one each for the first and the last"
        await asyncio.gather(*(call.aclose() for call in calls))


async def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new() -> None:
    async with _bench() as bench:
        events = bench.worker.prefill(_spec(18), _grant(5))
        await anext(events)
        bench.worker.begin_drain()
        with pytest.raises(Draining):
            await anext(bench.worker.prefill(_spec(4), _grant(1)))
        load = await anext(bench.worker.loads.watch(1.0))
        assert (load.draining, load.unfinished, load.running, load.leaked_kv_blocks) == (True, 1, 0, 0)
        bench.sender.transfers[0].end(HandoverDone(transport="tcp", kv_bytes=1, seconds=0.1))
        assert isinstance(await anext(events), HandedOver)
        await bench.all_blocks_free()
        bench.worker.end_drain()
        await anext(bench.worker.prefill(_spec(4, max_tokens=1), None))
        await bench.all_blocks_free()


async def test_aborting_all_ends_every_call_with_draining() -> None:
    async with _bench() as bench:
        bench.runner.close_gate()
        reading = [
            asyncio.ensure_future(anext(bench.worker.prefill(_spec(18, request_id=str(index)), _grant(5))))
            for index in range(3)
        ]
        assert await asyncio.to_thread(bench.runner.entered.wait, 5)
        bench.worker.abort_all()
        for result in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(result, Draining)
        bench.runner.open_gate()
        await bench.all_blocks_free()


async def test_load_watchers_see_a_request_come_and_go() -> None:
    async with _bench() as bench, aclosing(bench.worker.loads.watch(30.0)) as loads:
        assert (await anext(loads)).free_kv_blocks == 32
        events = bench.worker.prefill(_spec(18), _grant(5))
        await anext(events)
        async with asyncio.timeout(5):
            assert (await anext(loads)).free_kv_blocks == 27
        bench.sender.transfers[0].end(HandoverDone(transport="tcp", kv_bytes=1, seconds=0.1))
        await anext(events)
        async with asyncio.timeout(5):
            while (load := await anext(loads)).free_kv_blocks != 32:
                pass
        assert load.finished == 1
