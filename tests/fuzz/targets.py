"""What reads bytes that somebody else wrote. A target takes any bytes and raises only what is no answer to wrong input.

The errors that a caller may get are caught here; whatever else comes out is a bug, by which a request would end with
INTERNAL, or a thread of the KV channel without a word.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from fake_workers import make_bundle, make_model
from router.admission import check_fields, tokenize
from router.embedding_admission import admit_inputs
from router.pairing import Pairing
from router.service.door import Door, check_embed, check_encode, check_encode_stream
from router.worker_entry import ServedModel
from twinstage.errors import TwinstageError
from twinstage.hosting.sequence_check import check_sequence
from twinstage.rpc.convert_description import worker_description_from_proto, worker_load_from_proto
from twinstage.rpc.convert_public import (
    chat_prompt_from_proto,
    chat_request_from_proto,
    embed_request_from_proto,
    encode_request_from_proto,
    encode_stream_request_from_proto,
    generate_request_from_proto,
)
from twinstage.rpc.convert_worker import kv_grant_from_proto, sequence_spec_from_proto, token_chunk_from_proto
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import render_chat
from twinstage.text.tokenizer import TextTokenizer
from twinstage.transfer.frames import HEADER, decode_body, decode_header
from twinstage.types import RawEncodeRequest, RawGenerationRequest, Task
from twinstage.v1 import embedding_pb2, generation_pb2, tokenizer_pb2
from twinstage.worker.v1 import worker_pb2

Target = Callable[[bytes], None]

_PAIRING = Pairing(
    task="generate", model_fingerprint="m", tokenizer_fingerprint="t", kv_layout_fingerprint="k", protocol_version=1
)


@functools.cache
def _model(task: Task) -> ServedModel:
    bundle = make_bundle()
    return ServedModel(
        description=make_model(task=task, bundle=bundle), pairing=_PAIRING, tokenizer=TextTokenizer(bundle)
    )


def frames(data: bytes) -> None:
    """A frame of the KV channel: header, then body."""
    with contextlib.suppress(TwinstageError):
        header = decode_header(data[: HEADER.size])
        decode_body(header.kind, data[HEADER.size :])


def public(data: bytes) -> None:
    """A request of the public API, from its bytes to token ids; the first byte picks the method."""
    parse, work = _PUBLIC[(data[0] if data else 0) % len(_PUBLIC)]
    with contextlib.suppress(DecodeError, TwinstageError):
        work(parse(data[1:]))


def worker(data: bytes) -> None:
    """A message of the worker protocol, on either side; the first byte picks it."""
    work = _WORKER[(data[0] if data else 0) % len(_WORKER)]
    with contextlib.suppress(DecodeError, TwinstageError):
        work(data[1:])


def bundle(data: bytes) -> None:
    """A tokenizer bundle, from a worker."""
    with contextlib.suppress(TwinstageError):
        TextTokenizer(TokenizerBundle.from_bytes(data))


TARGETS: dict[str, Target] = {target.__name__: target for target in (frames, public, worker, bundle)}


# --- the public API -------------------------------------------------------------------------------


def _generation(raw: RawGenerationRequest) -> None:
    model = _model(Task.GENERATE)
    check_fields(raw, model)
    assert raw.prompt is not None
    if not getattr(raw.prompt, "chat_template", None):  # those are rendered elsewhere, where they may do what they want
        tokenize(raw.prompt, model)


def _generate(request: Any) -> None:
    Door(trusts_chat_templates=True).check_generate(request)
    _generation(generate_request_from_proto(request))


def _chat(request: Any) -> None:
    Door(trusts_chat_templates=True).check_chat(request)
    _generation(chat_request_from_proto(request))


def _render(request: Any) -> None:
    Door(trusts_chat_templates=False).check_render(request)
    render_chat(make_bundle(), chat_prompt_from_proto(request))


def _embedding(raw: RawEncodeRequest) -> None:
    admit_inputs(raw, _model(Task.EMBED))


def _encode(request: Any) -> None:
    check_encode(request)
    _embedding(encode_request_from_proto(request))


def _encode_stream(request: Any) -> None:
    check_encode_stream(request)
    _embedding(encode_stream_request_from_proto(request))


def _embed(request: Any) -> None:
    check_embed(request)
    _embedding(embed_request_from_proto(request))


_PUBLIC: tuple[tuple[Callable[[bytes], Any], Callable[[Any], None]], ...] = (
    (generation_pb2.GenerateRequest.FromString, _generate),
    (generation_pb2.ChatRequest.FromString, _chat),
    (tokenizer_pb2.RenderChatRequest.FromString, _render),
    (embedding_pb2.EncodeRequest.FromString, _encode),
    (embedding_pb2.EmbedRequest.FromString, _embed),
    (embedding_pb2.EncodeStreamRequest.FromString, _encode_stream),
)


# --- the worker protocol --------------------------------------------------------------------------


def _prefill_request(data: bytes) -> None:
    request = worker_pb2.PrefillRequest.FromString(data)
    check_sequence(sequence_spec_from_proto(request.sequence), _model(Task.GENERATE).description)
    kv_grant_from_proto(request.grant)


def _session_request(data: bytes) -> None:
    request = worker_pb2.SessionRequest.FromString(data)
    check_sequence(sequence_spec_from_proto(request.reserve.sequence), _model(Task.GENERATE).description)


def _tolerating_versions(work: Callable[[bytes], object]) -> Callable[[bytes], None]:
    """Enumerations of another version raise ValueError, which the router's connection translates."""

    def tolerant(data: bytes) -> None:
        with contextlib.suppress(ValueError):
            work(data)

    return tolerant


_WORKER: tuple[Callable[[bytes], None], ...] = (
    _prefill_request,
    _session_request,
    _tolerating_versions(lambda data: token_chunk_from_proto(worker_pb2.Chunk.FromString(data))),
    _tolerating_versions(lambda data: worker_description_from_proto(worker_pb2.DescribeResponse.FromString(data))),
    _tolerating_versions(lambda data: worker_load_from_proto(worker_pb2.WatchLoadResponse.FromString(data))),
)
