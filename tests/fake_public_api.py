"""A public API without a model behind it, for tests of clients: what it answers is what it was told to."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from twinstage.errors import FieldViolation, InvalidRequest, TwinstageError
from twinstage.rpc.convert_public import seconds_to_proto
from twinstage.rpc.status import error_to_status
from twinstage.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    scoring_pb2,
    scoring_pb2_grpc,
)

TOTALS: dict[str, Any] = {
    "usage": common_pb2.Usage(prompt_tokens=7, completion_tokens=3, cached_prompt_tokens=1),
    "timing": common_pb2.Timing(
        queue=seconds_to_proto(0.001), decode=seconds_to_proto(0.5), total=seconds_to_proto(1.25)
    ),
    "placement": common_pb2.Placement(
        prefill_worker="prefill-0", decode_worker="decode-0", transport="shm", kv_bytes=2048, retries=1
    ),
}
STOPPED: dict[str, Any] = {
    "finish_reason": common_pb2.FINISH_REASON_STOP,
    "matched_stop": common_pb2.MatchedStop(token_id=2),
}


@dataclass
class FakeApi(
    generation_pb2_grpc.GenerationServiceServicer,
    embedding_pb2_grpc.EmbeddingServiceServicer,
    scoring_pb2_grpc.ScoringServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """Streams `texts`, or `script`; refuses, fails with `error`, hangs, or leaves the summary out: when told to."""

    texts: tuple[str, ...] = ("Par", "", "is")
    error: TwinstageError | None = None
    refusals: list[TwinstageError] = field(default_factory=list)  # of the next requests, before anything is answered
    hangs: bool = False
    hangs_at: str = ""  # the text of a stream at which it hangs
    fingerprint: str = ""  # of its model
    bad_document: str = ""  # that no call can score
    leaves_out_summary: bool = False
    script: list[list[generation_pb2.Delta]] = field(default_factory=list)  # instead of texts, by call
    finishes: list[common_pb2.FinishReason.ValueType] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        return self._stream(request, context, generation_pb2.GenerateStreamResponse)

    def ChatStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        return self._stream(request, context, generation_pb2.ChatStreamResponse)

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        result = generation_pb2.GenerationResult(text="".join(self.texts), token_ids=[5, 2], **STOPPED)
        return generation_pb2.GenerateResponse(request_id="r", model="m", results=[result], **TOTALS)

    def Chat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        message = generation_pb2.ChatMessage(role="assistant", content="".join(self.texts))
        result = generation_pb2.ChatResult(message=message, **STOPPED)
        return generation_pb2.ChatResponse(request_id="r", model="m", results=[result], **TOTALS)

    def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        vectors = [
            embedding_pb2.Embedding(index=index, packed=b"\x00\x00\x80?\x00\x00\x00\xc0", dimensions=2)
            for index in range(len(request.texts))
        ]
        return embedding_pb2.EmbedResponse(request_id="r", model="e", embeddings=vectors, **TOTALS)

    def EncodeStream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for index, request in enumerate(requests):
            self._take(request, context)
            if request.input.text == self.hangs_at:
                self.cancelled.wait(30)
            if request.input.text == "bad":
                error = embedding_pb2.ItemError(code=3, message="input: is bad", reason="INVALID_REQUEST")
                yield embedding_pb2.EncodeStreamResponse(index=index, error=error)
                continue
            if request.input.text == "lost":
                error = embedding_pb2.ItemError(code=14, message="no worker of the model", reason="NO_WORKER")
                yield embedding_pb2.EncodeStreamResponse(index=index, error=error)
                continue
            packed = struct.pack("<2f", len(request.input.text), -2.0)
            vector = embedding_pb2.Embedding(packed=packed, dimensions=2, rows=1, prompt_tokens=3)
            if request.task == embedding_pb2.POOLING_TASK_TOKEN_EMBED:  # in two parts
                yield embedding_pb2.EncodeStreamResponse(index=index, embedding=vector, more_follows=True)
            yield embedding_pb2.EncodeStreamResponse(index=index, embedding=vector)

    def Encode(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        rows = 2 if request.task == embedding_pb2.POOLING_TASK_TOKEN_EMBED else 1
        vectors = [
            embedding_pb2.Embedding(index=index, packed=struct.pack("<2f", 0.25, 0.75) * rows, dimensions=2, rows=rows)
            for index in range(len(request.inputs))
        ]
        return embedding_pb2.EncodeResponse(request_id="r", model="m", embeddings=vectors, **TOTALS)

    def Score(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        if self.bad_document and self.bad_document in request.documents:
            wrong = FieldViolation(f"documents[{list(request.documents).index(self.bad_document)}]", "is bad")
            self._abort(context, InvalidRequest([wrong]))
        scores = [scoring_pb2.Score(index=index, score=0.5 - index) for index in range(len(request.documents))]
        return scoring_pb2.ScoreResponse(request_id="r", model="e", scores=scores, **TOTALS)

    def Rerank(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        results = [scoring_pb2.Score(index=index, score=index) for index in reversed(range(len(request.documents)))]
        top_n = request.top_n if request.HasField("top_n") else None
        return scoring_pb2.RerankResponse(request_id="r", model="e", results=results[:top_n], **TOTALS)

    def ListWorkers(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        worker = admin_pb2.Worker(
            id="decode-0",
            address="10.0.0.1:50062",
            role=admin_pb2.WORKER_ROLE_DECODE,
            state=admin_pb2.WORKER_STATE_READY,
            model="SmolLM2-135M-Instruct",
            total_kv_blocks=64,
            free_kv_blocks=60,
            kv_bytes_received=3 * 1024 * 1024,
            cached_kv_blocks=9,
            prefix_looked_up_blocks=8,
            prefix_found_blocks=6,
            transports=["shm", "tcp"],
        )
        lost = admin_pb2.Worker(address="10.0.0.2:50061", state=admin_pb2.WORKER_STATE_REFUSED, detail="other layout")
        lost.total_kv_blocks, lost.free_kv_blocks, lost.leaked_kv_blocks = 9, 7, 2
        return admin_pb2.ListWorkersResponse(workers=[worker, lost])

    def GetTrace(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        spans = [
            admin_pb2.TraceSpan(name="decode", process="decode-0", start=seconds_to_proto(0.5), attempt=2),
            admin_pb2.TraceSpan(name="attempt", process="router", attempt=1, error="WORKER_LOST: gone"),
        ]
        trace = admin_pb2.Trace(request_id=request.request_id, trace_id="0af7", model="m", spans=spans)
        trace.duration.CopyFrom(seconds_to_proto(1.25))
        return admin_pb2.GetTraceResponse(trace=trace)

    def DrainWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        worker = admin_pb2.Worker(
            id=request.worker_id,
            state=admin_pb2.WORKER_STATE_DRAINING,
            unfinished=0 if request.wait else 3,
            total_kv_blocks=8,
        )
        return admin_pb2.DrainWorkerResponse(worker=worker)

    def UndrainWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        worker = admin_pb2.Worker(id=request.worker_id, state=admin_pb2.WORKER_STATE_READY)
        return admin_pb2.UndrainWorkerResponse(worker=worker)

    def ResetPrefixCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        reset = admin_pb2.PrefixCacheReset(worker_id=request.worker_id or "decode-0", dropped_blocks=4)
        return admin_pb2.ResetPrefixCacheResponse(workers=[reset])

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request, context)
        model = model_pb2.Model(
            name="m", task=model_pb2.MODEL_TASK_GENERATE, max_model_len=8192, vocab_size=49152, ready=True
        )
        model.fingerprint = self.fingerprint
        model.labels.extend(["good", "bad"])
        return model_pb2.ListModelsResponse(models=[model])

    def _take(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self._refuse(context)
        if self.error is not None:
            self._abort(context, self.error)

    def _refuse(self, context: Any) -> None:
        if self.refusals:
            self._abort(context, self.refusals.pop(0))

    def _abort(self, context: Any, error: TwinstageError) -> None:
        status = error_to_status(error, "r")
        context.set_trailing_metadata(status.trailing_metadata)
        context.abort(status.code, status.message)

    def _stream(self, request: Any, context: Any, response: Any) -> Iterator[Any]:
        self.requests.append(request)
        self._refuse(context)
        context.add_callback(self.cancelled.set)
        yield response(prompt_info=generation_pb2.PromptInfo(request_id="r", model="m", prompt_tokens=7))
        texts = [generation_pb2.Delta(text=text) for text in self.texts]
        for delta in self.script.pop(0) if self.script else texts:
            yield response(delta=delta)
        if self.error is not None:
            self._abort(context, self.error)
        if self.hangs:
            self.cancelled.wait(30)
            return
        ended = {"finish_reason": self.finishes.pop(0)} if self.finishes else STOPPED
        yield response(finished=generation_pb2.Finished(**ended))
        if not self.leaves_out_summary:
            yield response(summary=generation_pb2.Summary(**TOTALS))


@contextmanager
def serving(api: FakeApi) -> Iterator[FakeApi]:
    """Serve on a free port of the loopback interface."""
    server = grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(api, server)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(api, server)
    scoring_pb2_grpc.add_ScoringServiceServicer_to_server(api, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(api, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(api, server)
    api.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield api
    finally:
        api.cancelled.set()
        server.stop(None).wait(10)
