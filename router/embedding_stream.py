"""Embedding as inputs arrive: results in the order of the requests, each with its own success or error.

    requests -> reader -> waiting inputs -> batchers: all that waits, together -> results, in order

At most MAX_IN_FLIGHT inputs, and MAX_IN_FLIGHT_BYTES with their results, are between the first and the last; beyond
that the client is not read.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from router.catalog import check_can_do
from router.embedding import Embedding, work_of
from router.embedding_admission import AdmittedInput
from router.encoder import EncodingCall, Vector
from router.gate import Gate
from router.generation import Deadlines
from router.input_tokens import input_limit
from router.worker_entry import ServedModel
from twinstage.errors import (
    ComputeFailed,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    TwinstageError,
    Unavailable,
)
from twinstage.telemetry.log import get_logger
from twinstage.types import PoolingTask, RawEncodeRequest, TextPrompt

MAX_IN_FLIGHT = 128
MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
MAX_BATCH_INPUTS = 32
BATCHERS = 4
_BYTES_PER_UNIT = 36  # a token's id as an object, in a tuple; more than a character takes, with the message it came in
_ROOM_FOR_SPECIAL_TOKENS = 1024  # and for a prompt

logger = get_logger(__name__)

StreamRequest = RawEncodeRequest | TwinstageError  # an error stands for a request that could not be read
StreamResult = Vector | TwinstageError


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An input on its way. `result` never holds an exception: a failed input has its error as its result."""

    request: StreamRequest
    result: asyncio.Future[StreamResult]
    num_bytes: int

    def settle(self, result: StreamResult) -> None:
        """Tell whoever waits for it: nobody, once the client has gone, which may have been a moment ago."""
        if not self.result.done():
            self.result.set_result(result)


class _Room:
    """What is in flight, bounded. One input may always go, however large it is. For one task that takes."""

    def __init__(self) -> None:
        self._inputs = self._bytes = 0
        self._changed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        while self._inputs and (self._inputs >= MAX_IN_FLIGHT or self._bytes + num_bytes > MAX_IN_FLIGHT_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self._inputs += 1
        self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._inputs -= 1
        self._bytes -= num_bytes
        self._changed.set()


class EmbeddingStream:
    """One EncodeStream call."""

    def __init__(
        self, embedding: Embedding, *, gate: Gate, deadlines: Deadlines, timeout_s: float | None, caller: str = ""
    ) -> None:
        self._embedding = embedding
        self._gate = gate
        self._deadlines = deadlines
        self._deadline_s = deadlines.deadline_s(timeout_s) if timeout_s is not None else float("inf")
        self._caller = caller
        self._id = uuid.uuid4().hex
        self._model: tuple[str, ServedModel] | None = None
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()  # bounded by the room
        self._ordered: asyncio.Queue[_Waiting | None] = asyncio.Queue()
        self._room = _Room()

    async def results(self, requests: AsyncIterator[StreamRequest]) -> AsyncGenerator[StreamResult, None]:
        """One result per request, in order. Ends when the requests end; raises what reading them raises."""
        reader = asyncio.create_task(self._read(requests))
        batchers = [asyncio.create_task(self._work_off()) for _ in range(BATCHERS)]
        try:
            while (waiting := await self._ordered.get()) is not None:
                yield await waiting.result
                self._room.leave(waiting.num_bytes)
            await reader
        finally:
            for task in (reader, *batchers):
                task.cancel()
            await asyncio.gather(reader, *batchers, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[StreamRequest]) -> None:
        try:
            async for request in requests:
                num_bytes = self._bytes_of(request)
                await self._room.take(num_bytes)
                waiting = _Waiting(request, asyncio.get_running_loop().create_future(), num_bytes)
                self._ordered.put_nowait(waiting)
                self._waiting.put_nowait(waiting)
        finally:
            self._ordered.put_nowait(None)

    def _bytes_of(self, request: StreamRequest) -> int:
        """Of an input and its result, at most."""
        if isinstance(request, TwinstageError):
            return 0
        (entry,) = request.inputs
        if entry is None:
            return 0
        size = len(entry.text.encode()) if isinstance(entry, TextPrompt) else len(entry.token_ids)
        try:
            model = self._model_of(request)
        except TwinstageError:  # it will be told when its turn comes
            return size * _BYTES_PER_UNIT
        of_tokens = request.task is PoolingTask.TOKEN_EMBED
        vectors = min(size + _ROOM_FOR_SPECIAL_TOKENS, input_limit(model)) if of_tokens else 1
        numbers = max(1, model.description.token_dimensions, model.description.embedding_dimensions)
        return size * _BYTES_PER_UNIT + vectors * 4 * numbers

    async def _work_off(self) -> None:
        """Take all that waits, answer it, and again."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < MAX_BATCH_INPUTS and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                await self._answer(batch)
            except TwinstageError as error:
                _fail(batch, error)
            except asyncio.CancelledError:  # by `results`, whose reader has gone; or by a bug, and nobody may wait then
                _fail(batch, Unavailable("the router stopped working on the input; try again"))
                raise
            except Exception as error:  # the outermost frame of this task; its inputs get an answer whatever happens
                logger.exception("batch failed unexpectedly")
                _fail(batch, InternalError(f"internal error in a batch: {type(error).__name__}"))

    async def _answer(self, batch: list[_Waiting]) -> None:
        """What waits in the client's connection meanwhile keeps an overload from growing, so a batch waits it out."""
        deadline_s = min(self._deadline_s, self._deadlines.deadline_s(None))
        while True:
            try:
                return await self._try_to_answer(batch, deadline_s)
            except QuotaExceeded:
                raise
            except Overloaded as error:
                if time.monotonic() + error.retry_after_s >= deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _try_to_answer(self, batch: list[_Waiting], deadline_s: float) -> None:
        try:
            permit = self._gate.permit(
                deadline_s=deadline_s, caller=self._caller, kind=("stream", len(batch).bit_length())
            )
            with self._embedding.quotas.admitted(self._caller) as account:
                async with asyncio.timeout_at(deadline_s), permit:
                    admitted = await self._admit_all(batch)
                    if admitted:
                        await self._encode(admitted, deadline_s=deadline_s)
                if account is not None:
                    account.use_tokens(sum(len(entry.token_ids) for _, entry in admitted))
        except TimeoutError:
            raise DeadlineExceeded("the deadline of the input is over") from None

    async def _admit_all(self, batch: list[_Waiting]) -> list[tuple[_Waiting, AdmittedInput]]:
        """Those that can be encoded; the others have their error as a result."""
        admitted: list[tuple[_Waiting, AdmittedInput]] = []
        for waiting in batch:
            try:
                admitted.append((waiting, await self._admit(waiting.request)))
            except TwinstageError as error:
                waiting.settle(error)
        return admitted

    async def _admit(self, request: StreamRequest) -> AdmittedInput:
        if isinstance(request, TwinstageError):
            raise request
        model = self._model_of(request)
        return (await self._embedding.admit(request, model))[0]

    def _model_of(self, request: RawEncodeRequest) -> ServedModel:
        """The stream's model, which its first request names."""
        if self._model is None:
            self._model = (request.model, self._embedding.find_model(request.model, work_of(request.task)))
        name, model = self._model
        if request.model not in {name, model.name}:
            raise InvalidRequest([FieldViolation("model", f"must be the same in the whole stream, {model.name!r}")])
        check_can_do(model, work_of(request.task))
        return model

    async def _encode(self, admitted: list[tuple[_Waiting, AdmittedInput]], *, deadline_s: float) -> None:
        """What cannot be computed is looked for by halves, so that it fails alone."""
        assert self._model is not None
        call = EncodingCall(model=self._model[1], request_id=self._id, deadline_s=deadline_s, is_stream=True)
        try:
            vectors = await self._embedding.encoder.encode([entry for _, entry in admitted], call)
        except ComputeFailed as error:
            if len(admitted) == 1:
                admitted[0][0].settle(error)
                return
            half = len(admitted) // 2
            await self._encode(admitted[:half], deadline_s=deadline_s)
            await self._encode(admitted[half:], deadline_s=deadline_s)
            return
        for (waiting, _), vector in zip(admitted, vectors, strict=True):
            waiting.settle(vector)


def _fail(batch: list[_Waiting], error: TwinstageError) -> None:
    for waiting in batch:
        waiting.settle(error)
