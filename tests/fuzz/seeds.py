"""Inputs to begin with: good messages, and what a search has found: in `corpus/`, a line of base64 each."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format

from fake_workers import make_bundle
from twinstage.transfer.frames import encode
from twinstage.transfer.messages import (
    Abort,
    Ack,
    Commit,
    Hello,
    Introduction,
    Open,
    Piece,
    Proof,
    Refused,
    Revoke,
    Write,
)
from twinstage.v1 import embedding_pb2, generation_pb2, tokenizer_pb2
from twinstage.worker.v1 import worker_pb2

CORPUS = Path(__file__).resolve().parent / "corpus"

_OPTIONS = {
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": "7", "logit_bias": {"3": 1.5}},
    "stopping": {"max_tokens": 5, "min_tokens": 1, "stop": ["a", "é"], "stop_token_ids": [3], "time_limit": "1.5s"},
    "output": {"logprobs": 3, "return_token_ids": True},
    "priority": 3,
    "cache_salt": "tenant",
    "request_id": "mine",
}
_CONVERSATION = {
    "messages": [{"role": "user", "content": "Hi", "name": "me"}, {"role": "assistant", "content": "He"}],
    "chat_template_kwargs": {"tools": [{"name": "f", "depth": {"a": [1, None, True]}}]},
    "continue_final_message": True,
}
_PUBLIC = (
    (0, generation_pb2.GenerateRequest, {"prompt": "Hello"}),
    (0, generation_pb2.GenerateRequest, {"prompt": "Grüße 👋", **_OPTIONS}),
    (
        0,
        generation_pb2.GenerateRequest,
        {"prompt_token_ids": {"ids": [1, 2, 256]}, "output": {"prompt_logprobs": 2}},
    ),
    (0, generation_pb2.GenerateRequest, {"batch": {"prompts": [{"prompt": "a"}, {"prompt_token_ids": {"ids": [1]}}]}}),
    (1, generation_pb2.ChatRequest, {**_CONVERSATION, **_OPTIONS}),
    (2, tokenizer_pb2.RenderChatRequest, _CONVERSATION),
    (3, embedding_pb2.EncodeRequest, {"inputs": [{"text": "a"}, {"token_ids": {"ids": [1]}}], "dimensions": 2}),
    (4, embedding_pb2.EmbedRequest, {"texts": ["a", "b"], "truncation": {"tokens": 1}, "normalize": True}),
    (5, embedding_pb2.EncodeStreamRequest, {"input": {"text": "a"}}),
)
_SEQUENCE = {"request_id": "r", "prompt_token_ids": [1, 2], "max_tokens": 3, "temperature": 1.0, "top_p": 1.0}
_WORKER = (
    (0, worker_pb2.PrefillRequest, {"sequence": _SEQUENCE, "grant": {"worker_id": "d", "block_ids": [1, 2]}}),
    (1, worker_pb2.SessionRequest, {"reserve": {"sequence": _SEQUENCE, "deadline_ms": "1000"}}),
    (2, worker_pb2.Chunk, {"request_id": "r", "tokens": [{"id": 3}]}),
    (3, worker_pb2.DescribeResponse, {"worker_id": "w", "role": 1}),
    (4, worker_pb2.WatchLoadResponse, {"free_kv_blocks": 3}),
)


def seeds(target: str) -> list[bytes]:
    """Good messages, then what `corpus/` has."""
    good = {"frames": _frames, "public": lambda: _messages(_PUBLIC), "worker": lambda: _messages(_WORKER)}
    made = list(good[target]()) if target in good else [make_bundle().to_bytes()]
    path = CORPUS / f"{target}.txt"
    found = path.read_text().split() if path.exists() else []
    return made + [base64.b64decode(line) for line in found]


def write_corpus(target: str, found: list[bytes]) -> None:
    """Keep what was found, in its order."""
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{base64.b64encode(data).decode()}\n" for data in found))


def _messages(rows: tuple[tuple[int, type, dict[str, object]], ...]) -> Iterator[bytes]:
    for number, kind, fields in rows:
        yield bytes([number]) + json_format.ParseDict(fields, kind()).SerializeToString()


def _frames() -> Iterator[bytes]:
    digest = "0" * 64
    yield encode(Hello(transport="shm", nonce=digest))
    yield encode(
        Introduction(
            protocol_version=3,
            worker_id="p",
            epoch=1,
            layout_fingerprint="k",
            target_worker_id="d",
            target_epoch=2**63,
            proof=digest,
        )
    )
    yield encode(Proof(proof=digest))
    yield encode(Refused(reason="STALE_HANDLE", message="é"))
    yield encode(Open(transfer_id=1, epoch=2, generation=3, proof=digest))
    yield encode(Commit(transfer_id=1, request_id="r", num_tokens=2, first_tokens=((0, 3), (2, 4))))
    for kind in (Ack, Abort, Revoke):
        yield encode(kind(transfer_id=2**64 - 1))
    piece = Piece(position=0, block_id=1, offset=0, length=64, generation=1, checksum=2**64 - 1)
    yield encode(Write(transfer_id=1, pieces=(piece, piece)), payload_bytes=128)
