"""Workers that compute nothing: `python -m bench.engines.paced_workers`, with `tests/` in PYTHONPATH.

    start  prefill, decode, interval_ms, rows  -> {"addresses": [...], "prefill_address": "..."}
    stop

They are the tests' fake workers, but a decode worker makes a token for each of its first `rows` sequences every
`interval_ms`, and sends a step's tokens in one message, as a real one does. The tokenizer is the demo model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import fake_workers
from bench.engines.protocol import Handler, serve
from twinstage.models.resolve import resolve_model
from twinstage.rpc.convert_worker import token_chunk_to_proto
from twinstage.text.bundle import TokenizerBundle, read_bundle
from twinstage.types import Finish, FinishReason, KvGrant, ProducedToken, RequestId, SequenceSpec, TokenChunk
from twinstage.worker.v1 import worker_pb2

Result = TypeVar("Result")

_WORDS = range(1_000, 9_000)  # token ids that are pieces of words
_MAX_MODEL_LEN = 8_192
_TOTAL_BLOCKS = 1_000_000


def token_at(spec: SequenceSpec, position: int) -> TokenChunk:
    """The chunk with the token at a position; the last one says so."""
    token_id = _WORDS[(spec.sampling.seed + 7 * position) % len(_WORDS)]
    finish = Finish(reason=FinishReason.LENGTH) if position + 1 >= spec.max_tokens else None
    return TokenChunk(request_id=RequestId(spec.request_id), tokens=(ProducedToken(token_id=token_id),), finish=finish)


class PacedDecode(fake_workers.FakeDecode):
    """A decode worker that makes steps."""

    interval_s = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._live: dict[str, int] = {}  # request -> position of its next token
        self._ticker: asyncio.Task[None] | None = None

    def commit(self, grant: KvGrant, going_on: Sequence[int]) -> None:
        request_id = self._transfers.pop(grant.transfer_id)
        self._live[request_id] = 1
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while self._live:
            await asyncio.sleep(self.interval_s)
            self._step()

    def _step(self) -> None:
        steps: dict[str, worker_pb2.SessionStep] = {}
        for request_id, position in tuple(islice(self._live.items(), self.description.max_num_sequences)):
            reservation = self.reservations.get(request_id)
            if reservation is None:  # aborted
                del self._live[request_id]
                continue
            step = steps.setdefault(reservation.session_id, worker_pb2.SessionStep())
            chunk = token_at(reservation.spec, position)
            step.chunks.append(token_chunk_to_proto(chunk))
            self._live[request_id] += 1
            if chunk.finish is not None:
                step.totals.add(request_id=request_id, queue_us=1, decode_us=1, kv_bytes_received=1)
                del self._live[request_id]
                self._free(request_id)
        for session_id, step in steps.items():
            if session_id in self._sessions:
                self._sessions[session_id].put_nowait(worker_pb2.SessionResponse(step=step))


class PacedWorkers:
    """Answers the commands; the workers live on an event loop in a thread of its own."""

    def __init__(self) -> None:
        fake_workers.make_chunk = token_at  # of the prefill workers, whose sequences are as long
        self._bundle = read_bundle(resolve_model("demo").directory)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._stack = contextlib.AsyncExitStack()

    def describe(self) -> dict[str, Any]:
        return {"name": "paced workers", "versions": {}}

    def start(self, prefill: int, decode: int, interval_ms: float, rows: int) -> dict[str, Any]:
        self.stop()
        cluster = self._run(self._started(prefill, decode, interval_ms / 1e3, rows))
        return {"addresses": cluster.addresses, "prefill_address": cluster.prefill[0].address}

    def stop(self) -> dict[str, Any]:
        self._run(self._stack.aclose())
        return {}

    async def _started(self, prefill: int, decode: int, interval_s: float, rows: int) -> fake_workers.FakeCluster:
        cluster = _make_cluster(self._bundle, prefill=prefill, decode=decode, rows=rows)
        for worker in cluster.decode:
            assert isinstance(worker, PacedDecode)
            worker.interval_s = interval_s
        return await self._stack.enter_async_context(cluster)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


def _make_cluster(bundle: TokenizerBundle, *, prefill: int, decode: int, rows: int) -> fake_workers.FakeCluster:
    """Fake workers of a model whose sequences may be long, with paced decode workers."""
    model = replace(fake_workers.make_model(bundle=bundle), max_model_len=_MAX_MODEL_LEN, vocab_size=49_152)
    cluster = fake_workers.FakeCluster(
        prefill=prefill, decode=decode, model=model, bundle=bundle, total_blocks=_TOTAL_BLOCKS
    )
    cluster.decode = [
        PacedDecode(replace(worker.description, max_num_sequences=rows), bundle) for worker in cluster.decode
    ]
    for worker in cluster.prefill:
        worker.peers = {peer.description.worker_id: peer for peer in cluster.decode}
    return cluster


def load() -> dict[str, Handler]:
    workers = PacedWorkers()
    return {"describe": workers.describe, "start": workers.start, "stop": workers.stop}


if __name__ == "__main__":
    serve(load)
