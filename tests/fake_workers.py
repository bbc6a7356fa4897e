"""Prefill and decode workers without a model: they speak the worker protocol over real gRPC, in this process.

A token is a pure function of the prompt and its position, as with a real model and a seed, so a continuation can be
checked after any failure. `Script` stalls or fails a worker in a phase of the next requests.

    async with FakeCluster(prefill=2, decode=1) as cluster:
        cluster.prefill[0].script.fail("first_token", WorkerLost("gone"))
        ...
        cluster.assert_idle()
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from twinstage.errors import ComputeFailed, TwinstageError
from twinstage.rpc.convert_description import worker_description_to_proto, worker_load_to_proto
from twinstage.rpc.convert_worker import (
    kv_grant_from_proto,
    kv_grant_to_proto,
    sequence_spec_from_proto,
    token_chunk_to_proto,
)
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.rpc.server import bind, create_server
from twinstage.text.bundle import TokenizerBundle
from twinstage.types import (
    Finish,
    FinishReason,
    KvEndpoint,
    KvGrant,
    ModelDescription,
    ProducedToken,
    RequestId,
    Role,
    SequenceSpec,
    Task,
    TokenChunk,
    TokenLogprobs,
    WorkerDescription,
    WorkerId,
    WorkerLoad,
)
from twinstage.worker.v1 import worker_pb2, worker_pb2_grpc

BLOCK_SIZE = 4
BLOCK_BYTES = 100
MAX_MODEL_LEN = 64
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTER_IDS = [ALPHABET.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"


@functools.cache
def make_bundle(**changes: Any) -> TokenizerBundle:
    """A tokenizer with one token per byte (ids 0 to 255 in the order of the byte-level alphabet) and <eos>, 256."""
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<eos>"])
    values: dict[str, Any] = {"chat_template": CHAT_TEMPLATE, "eos_token_ids": (256,), **changes}
    return TokenizerBundle(tokenizer_json=tokenizer.to_str(), **values)


def make_model(
    *,
    name: str = "fake",
    task: Task = Task.GENERATE,
    bundle: TokenizerBundle | None = None,
    fingerprint: str = "m1",
    max_model_len: int = MAX_MODEL_LEN,
) -> ModelDescription:
    return ModelDescription(
        name=name,
        fingerprint=fingerprint,
        task=task,
        max_model_len=max_model_len,
        vocab_size=257,
        eos_token_ids=(256,) if task is Task.GENERATE else (),
        tokenizer_fingerprint=(bundle or make_bundle()).fingerprint,
        embedding_dimensions=4 if task is Task.EMBED else 0,
        token_dimensions=4 if task is Task.EMBED else 0,
    )


def expected_token(spec: SequenceSpec, position: int) -> int:
    """The token at a position of the output: a letter, chosen by prompt, seed and choice."""
    choice = struct.pack("<I", spec.sampling.choice_index) if spec.sampling.choice_index else b""
    key = struct.pack("<QQ", spec.sampling.seed, position) + b"".join(
        struct.pack("<I", token_id) for token_id in spec.prompt_token_ids
    )
    return LETTER_IDS[hashlib.sha256(key + choice).digest()[0] % len(LETTER_IDS)]


def make_scores(spec: SequenceSpec, start: int) -> worker_pb2.PromptLogprobs:
    """Of two prompt tokens from position `start` on, or of the last one."""
    token_ids = spec.prompt_token_ids[start : start + 2]
    count = spec.prompt_logprobs or 0
    return worker_pb2.PromptLogprobs(
        start=start,
        token_ids=token_ids,
        logprobs=[-float(start + index) for index in range(len(token_ids))],
        ranks=[1] * len(token_ids),
        top_ids=[token_id for token_id in token_ids for _ in range(count)],
        top_logprobs=[-0.5] * (count * len(token_ids)),
    )


class Script:
    """What goes wrong on a worker, by phase. `fail` and `stall` apply to the next request only."""

    def __init__(self) -> None:
        self._errors: dict[str, list[TwinstageError]] = {}
        self._stalls: dict[str, list[tuple[asyncio.Event, TwinstageError | None]]] = {}
        self._reached: dict[str, asyncio.Event] = {}
        self._slow: dict[str, float] = {}

    def fail(self, phase: str, error: TwinstageError, *, times: int = 1) -> None:
        self._errors.setdefault(phase, []).extend([error] * times)

    def stall(self, phase: str, *, then: TwinstageError | None = None) -> asyncio.Event:
        """The next request waits in `phase` until the event is set, and fails with `then` if it is given."""
        event = asyncio.Event()
        self._stalls.setdefault(phase, []).append((event, then))
        return event

    def slow(self, phase: str, *, seconds: float) -> None:
        """Every request takes so long in `phase`."""
        self._slow[phase] = seconds

    def reached(self, phase: str) -> asyncio.Event:
        """Set once a request has come to `phase`."""
        return self._reached.setdefault(phase, asyncio.Event())

    async def enter(self, phase: str) -> None:
        self.reached(phase).set()
        if phase in self._slow:
            await asyncio.sleep(self._slow[phase])
        if self._errors.get(phase):
            raise self._errors[phase].pop(0)
        if self._stalls.get(phase):
            go_on, error = self._stalls[phase].pop(0)
            await go_on.wait()
            if error is not None:
                raise error


@dataclass
class _Reservation:
    spec: SequenceSpec
    session_id: str
    blocks: int
    task: asyncio.Task[None] | None = None
    ended: set[int] = field(default_factory=set)  # choices that the router has ended


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """What both roles have: a server that can be started, killed and started again at the same address."""

    def __init__(self, description: WorkerDescription, bundle: TokenizerBundle) -> None:
        self.description = description
        self.bundle = bundle
        self.script = Script()
        self.address = ""
        self.load = WorkerLoad(free_kv_blocks=description.total_kv_blocks)
        self.served = 0
        self.resets = 0
        self.cached_blocks = 5
        self._load_changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = create_server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._add_service(self._server)
        port = bind(self._server, self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        """Go away without a word to anybody."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Come back at the same address as a new worker."""
        await self.kill()
        self.description = replace(self.description, epoch=self.description.epoch + 1)
        await self.start()

    def report(self, load: WorkerLoad) -> None:
        self.load = load
        self._load_changed.set()

    def _add_service(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:  # noqa: N802
        return worker_description_to_proto(self.description)

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        while True:
            await self.script.enter("load")
            self._load_changed.clear()
            yield worker_load_to_proto(self.load)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.interval_ms / 1000):
                    await self._load_changed.wait()

    async def ResetPrefixCache(  # noqa: N802
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        await self.script.enter("reset")
        self.resets += 1
        return worker_pb2.ResetPrefixCacheResponse(dropped_blocks=self.cached_blocks)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:  # noqa: N802
        await self.script.enter("drain")
        self.report(replace(self.load, draining=True))
        return worker_pb2.DrainResponse()

    async def Undrain(self, request: worker_pb2.UndrainRequest, context: Any) -> worker_pb2.UndrainResponse:  # noqa: N802
        await self.script.enter("undrain")
        self.report(replace(self.load, draining=False))
        return worker_pb2.UndrainResponse()

    async def GetTokenizerBundle(  # noqa: N802
        self, request: worker_pb2.GetTokenizerBundleRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GetTokenizerBundleResponse]:
        await self.script.enter("bundle")
        data = self.bundle.to_bytes()
        yield worker_pb2.GetTokenizerBundleResponse(data=data[:100])
        yield worker_pb2.GetTokenizerBundleResponse(data=data[100:])


class FakePrefill(FakeWorker, worker_pb2_grpc.PrefillServiceServicer):
    """Makes first tokens and vectors. A vector of an input is [number of tokens, first id, last id, 1]."""

    def __init__(self, description: WorkerDescription, bundle: TokenizerBundle) -> None:
        super().__init__(description, bundle)
        self.running: set[str] = set()
        self.waiting: set[str] = set()  # for their grants
        self.specs: list[SequenceSpec] = []
        self.grants: list[KvGrant | None] = []
        self.encode_batches: list[int] = []
        self.hangs_at = 0  # tokens of an input on which it computes until it is killed
        self.fails_at = 0  # tokens of an input on which it fails
        self.encoding: dict[str, list[int]] = {}  # by call, the lengths of the inputs that it computes
        self.cached_tokens: list[int] = []  # what it finds of the next prompts in its cache
        self.peers: dict[str, FakeDecode] = {}

    def _add_service(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Prefill(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.PrefillRequest], context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        request = await anext(requests)
        spec = sequence_spec_from_proto(request.sequence)
        if request.grant_follows:
            self.waiting.add(spec.request_id)
            try:
                if not (request := await anext(requests, worker_pb2.PrefillRequest())).HasField("grant"):
                    return  # the router has gone
            finally:
                self.waiting.discard(spec.request_id)
        grant = kv_grant_from_proto(request.grant) if request.HasField("grant") else None
        self.specs.append(spec)
        self.grants.append(grant)
        self.running.add(spec.request_id)
        try:
            for start in range(1, len(spec.prompt_token_ids), 2) if spec.prompt_logprobs is not None else ():
                yield worker_pb2.PrefillResponse(prompt_logprobs=make_scores(spec, start))
                await self.script.enter("scored")
            await self.script.enter("first_token")
            self.served += 1
            chunks = [choice_chunk(spec, index, len(spec.resumed_token_ids)) for index in range(spec.num_choices)]
            yield worker_pb2.PrefillResponse(
                first_token=worker_pb2.FirstToken(
                    chunk=token_chunk_to_proto(chunks[0]),
                    other_chunks=map(token_chunk_to_proto, chunks[1:]),
                    queue_us=1000,
                    prefill_us=2000,
                    cached_prompt_tokens=self.cached_tokens.pop(0) if self.cached_tokens else 0,
                )
            )
            going_on = [chunk.choice_index for chunk in chunks if chunk.finish is None]
            if not going_on or grant is None:
                return
            await self.script.enter("hand_over")
            kv_bytes = len(grant.block_ids) * BLOCK_BYTES
            self.peers[grant.worker_id].commit(grant, going_on)
            yield worker_pb2.PrefillResponse(
                handed_over=worker_pb2.HandedOver(transport="shm", kv_bytes=kv_bytes, transfer_us=3000)
            )
        finally:
            self.running.discard(spec.request_id)

    async def Encode(self, request: worker_pb2.EncodeRequest, context: Any) -> worker_pb2.EncodeResponse:  # noqa: N802
        self.running.add(request.request_id)
        self.encoding[request.request_id] = [len(entry.token_ids) for entry in request.inputs]
        try:
            await self.script.enter("encode")
            if self.fails_at in self.encoding[request.request_id]:
                raise ComputeFailed("the numbers are not finite")
            if self.hangs_at in self.encoding[request.request_id]:
                await asyncio.Event().wait()
            self.encode_batches.append(len(request.inputs))
            self.served += 1
            is_score = request.task == worker_pb2.POOLING_TASK_SCORE
            return worker_pb2.EncodeResponse(
                vectors=() if is_score else [self._vectors(entry, request) for entry in request.inputs],
                scores=[make_score(entry) for entry in request.inputs] if is_score else (),
                queue_us=1000,
                compute_us=2000,
            )
        finally:
            self.running.discard(request.request_id)
            self.encoding.pop(request.request_id, None)

    def _vectors(self, entry: worker_pb2.EncodeInput, request: worker_pb2.EncodeRequest) -> bytes:
        token_ids = entry.token_ids[entry.prompt_tokens :]
        if request.task == worker_pb2.POOLING_TASK_CLASSIFY:
            return make_probabilities(token_ids)
        if request.task == worker_pb2.POOLING_TASK_TOKEN_EMBED:
            size = 4 * self.description.model.token_dimensions
            rows = (make_vector([token_id], normalize=request.normalize) for token_id in entry.token_ids)
            return b"".join(row.ljust(size, b"\0") for row in rows)
        return make_vector(token_ids, normalize=request.normalize)


class FakeDecode(FakeWorker, worker_pb2_grpc.DecodeServiceServicer):
    """Grants blocks, and makes all tokens but the first, one per step."""

    def __init__(self, description: WorkerDescription, bundle: TokenizerBundle) -> None:
        super().__init__(description, bundle)
        self.reservations: dict[str, _Reservation] = {}
        self.aborted: list[str] = []
        self.aborted_choices: list[tuple[str, int]] = []
        self._sessions: dict[str, asyncio.Queue[worker_pb2.SessionResponse]] = {}
        self._transfers: dict[int, str] = {}
        self._next_transfer = itertools.count(1)
        self.shared_blocks = 0  # leading ones of every prompt, which are held already

    def _add_service(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    @property
    def free_blocks(self) -> int:
        held = sum(reservation.blocks for reservation in self.reservations.values())
        return self.description.total_kv_blocks - held

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        session_id = (await anext(requests)).open.session_id
        outgoing = self._sessions[session_id] = asyncio.Queue()
        reader = asyncio.create_task(self._read(session_id, requests))
        try:
            yield worker_pb2.SessionResponse(opened=worker_pb2.SessionOpened())
            while True:
                yield await outgoing.get()
        finally:
            reader.cancel()
            del self._sessions[session_id]
            for request_id, reservation in tuple(self.reservations.items()):
                if reservation.session_id == session_id:
                    self._free(request_id)

    async def _read(self, session_id: str, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        reserving: dict[str, asyncio.Task[None]] = {}
        try:
            async for request in requests:
                if request.HasField("reserve"):
                    request_id = request.reserve.sequence.request_id
                    reserving[request_id] = asyncio.create_task(self._reserve(session_id, request.reserve))
                    continue
                if request.abort.HasField("choice_index"):
                    self._end_choice(request.abort.request_id, request.abort.choice_index)
                    continue
                self.aborted.append(request.abort.request_id)
                if request.abort.request_id in reserving:
                    reserving[request.abort.request_id].cancel()
                self._free(request.abort.request_id)
        finally:
            for task in reserving.values():
                task.cancel()

    def _end_choice(self, request_id: str, index: int) -> None:
        self.aborted_choices.append((request_id, index))
        if (reservation := self.reservations.get(request_id)) is not None:
            reservation.ended.add(index)

    def _free(self, request_id: str) -> None:
        reservation = self.reservations.pop(request_id, None)
        if reservation is not None:
            if reservation.task is not None:
                reservation.task.cancel()
            self.report(replace(self.load, free_kv_blocks=self.free_blocks, running=len(self.reservations)))

    async def _reserve(self, session_id: str, request: worker_pb2.SessionReserve) -> None:
        spec = sequence_spec_from_proto(request.sequence)
        try:
            await self.script.enter("reserve")
        except TwinstageError as error:
            self._tell_failure(session_id, spec.request_id, error)
            return
        num_tokens = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
        blocks = -(-num_tokens // BLOCK_SIZE) - self.shared_blocks
        spare = spec.num_choices - 1
        self.reservations[spec.request_id] = _Reservation(spec=spec, session_id=session_id, blocks=blocks + spare)
        self.report(replace(self.load, free_kv_blocks=self.free_blocks, running=len(self.reservations)))
        transfer_id = next(self._next_transfer)
        self._transfers[transfer_id] = spec.request_id
        grant = KvGrant(
            worker_id=self.description.worker_id,
            epoch=self.description.epoch,
            transfer_id=transfer_id,
            generation=1,
            token=b"token",
            block_ids=tuple(range(blocks)),
            num_cached_blocks=self.shared_blocks,
            layout_fingerprint=self.description.kv_layout_fingerprint,
            endpoints=(
                KvEndpoint(transport="shm", address="/run/kv.sock", host_id="host"),
                KvEndpoint(transport="tcp", address=":7000", host_id="host"),
            ),
            lease_s=30,
        )
        answer = worker_pb2.SessionGrant(request_id=spec.request_id, grant=kv_grant_to_proto(grant), queue_us=4000)
        self._sessions[session_id].put_nowait(worker_pb2.SessionResponse(grant=answer))

    def commit(self, grant: KvGrant, going_on: Sequence[int]) -> None:
        """The blocks are here, and the first tokens of the choices that go on from them."""
        request_id = self._transfers.pop(grant.transfer_id)
        reservation = self.reservations[request_id]
        reservation.task = asyncio.create_task(self._decode(reservation, list(going_on)))

    def fail(self, request_id: str, error: TwinstageError) -> None:
        """End a request that is reserved or running, and tell the router."""
        session_id = self.reservations[request_id].session_id
        self._free(request_id)
        self._tell_failure(session_id, request_id, error)

    def _tell_failure(self, session_id: str, request_id: str, error: TwinstageError) -> None:
        failure = worker_pb2.SessionFailure(
            request_id=request_id, reason=error.reason, message=str(error), retryable=error.retryable
        )
        self._sessions[session_id].put_nowait(worker_pb2.SessionResponse(failure=failure))

    async def _decode(self, reservation: _Reservation, running: list[int]) -> None:
        spec, outgoing = reservation.spec, self._sessions[reservation.session_id]
        self.served += 1
        position = len(spec.resumed_token_ids) + 1
        while True:
            try:
                await self.script.enter("decode")
                await self.script.enter(f"decode {position}")
            except TwinstageError as error:
                reservation.task = None
                self.fail(spec.request_id, error)
                return
            chunks = [choice_chunk(spec, index, position) for index in running if index not in reservation.ended]
            running = [chunk.choice_index for chunk in chunks if chunk.finish is None]
            step = worker_pb2.SessionStep(chunks=map(token_chunk_to_proto, chunks))
            if not running:
                step.totals.add(
                    request_id=spec.request_id,
                    queue_us=5000,
                    decode_us=6000,
                    kv_bytes_received=(reservation.blocks - spec.num_choices + 1) * BLOCK_BYTES,
                )
                reservation.task = None
                self._free(spec.request_id)
            outgoing.put_nowait(worker_pb2.SessionResponse(step=step))
            if not running:
                return
            position += 1
            await asyncio.sleep(0)


def choice_chunk(spec: SequenceSpec, index: int, position: int) -> TokenChunk:
    """That of one choice of several."""
    sampling = replace(spec.sampling, choice_index=spec.sampling.choice_index + index)
    return replace(make_chunk(replace(spec, sampling=sampling), position), choice_index=index)


def make_chunk(spec: SequenceSpec, position: int) -> TokenChunk:
    """The token at `position`, and the end of the generation where it ends with it."""
    token_id = expected_token(spec, position)
    logprobs = TokenLogprobs(logprob=-1.0, rank=1) if spec.logprobs is not None else None
    finish = None
    if token_id in spec.stop_token_ids and position + 1 >= spec.min_tokens:
        finish = Finish(reason=FinishReason.STOP, matched_token_id=token_id)
    elif position + 1 == spec.max_tokens:
        finish = Finish(reason=FinishReason.LENGTH)
    elif len(spec.prompt_token_ids) + position + 1 == MAX_MODEL_LEN:
        finish = Finish(reason=FinishReason.CONTEXT_LIMIT)
    return TokenChunk(
        request_id=RequestId(spec.request_id),
        tokens=(ProducedToken(token_id=token_id, logprobs=logprobs),),
        finish=finish,
    )


def make_vector(token_ids: Sequence[int], *, normalize: bool) -> bytes:
    values = [float(len(token_ids)), float(token_ids[0]), float(token_ids[-1]), 1.0]
    length = sum(value * value for value in values) ** 0.5 if normalize else 1.0
    return struct.pack("<4f", *(value / length for value in values))


def make_probabilities(token_ids: Sequence[int]) -> bytes:
    """Of two labels."""
    return struct.pack("<2f", len(token_ids) / (len(token_ids) + 1), 1 / (len(token_ids) + 1))


def make_score(entry: worker_pb2.EncodeInput) -> float:
    """Tells a pair by its length, its types and its last token."""
    return len(entry.token_ids) + sum(entry.token_type_ids) / 64 + entry.token_ids[-1] / 4096


class FakeCluster:
    """Workers of one model, started together and ended with the scope."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        model: ModelDescription | None = None,
        bundle: TokenizerBundle | None = None,
        total_blocks: int = 64,
        layout: str = "layout",
        prefix: str = "",
    ) -> None:
        self.bundle = bundle or make_bundle()
        self.model = model or make_model(bundle=self.bundle)
        self._total_blocks = total_blocks
        self._layout = layout
        self.prefill = [
            FakePrefill(self._describe(f"{prefix}prefill-{index}", Role.PREFILL), self.bundle)
            for index in range(prefill)
        ]
        self.decode = [
            FakeDecode(self._describe(f"{prefix}decode-{index}", Role.DECODE), self.bundle) for index in range(decode)
        ]
        for worker in self.prefill:
            worker.peers = {peer.description.worker_id: peer for peer in self.decode}

    def _describe(self, worker_id: str, role: Role) -> WorkerDescription:
        is_generative = self.model.task is Task.GENERATE
        return WorkerDescription(
            worker_id=WorkerId(worker_id),
            epoch=1,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            model=self.model,
            kv_layout_fingerprint=self._layout if is_generative else "",
            total_kv_blocks=self._total_blocks if is_generative else 0,
            kv_block_size=BLOCK_SIZE if is_generative else 0,
            kv_block_bytes=BLOCK_BYTES if is_generative else 0,
            max_num_sequences=8,
            transports=("shm", "tcp") if is_generative else (),
        )

    @property
    def workers(self) -> list[FakePrefill | FakeDecode]:
        return [*self.prefill, *self.decode]

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            await worker.start()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            await worker.kill()

    async def assert_idle(self, timeout_s: float = 5.0) -> None:
        """Every block comes back and nothing runs, within the timeout."""

        def is_idle() -> bool:
            return not any(worker.running or worker.waiting for worker in self.prefill) and not any(
                worker.reservations for worker in self.decode
            )

        await until(is_idle, what="idle workers", timeout_s=timeout_s)


async def until(condition: Callable[[], object], *, what: str, timeout_s: float = 10.0) -> None:
    """Return as soon as `condition` holds. Raises AssertionError naming `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what tests wait for has no event of its own
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout_s} s") from None
