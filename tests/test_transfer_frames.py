"""The frame decoder: what was encoded comes back, and nothing else gets through, whatever the bytes are."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_ends import commit_of
from twinstage.errors import HandshakeRefused, TransferError
from twinstage.transfer.frames import (
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PIECES,
    FrameType,
    decode_body,
    decode_header,
    encode,
)
from twinstage.transfer.messages import (
    MAX_CHOICES,
    Ack,
    Hello,
    JsonMessage,
    Message,
    Nack,
    Opened,
    Piece,
    Write,
    commit_from_message,
    commit_to_message,
)
from twinstage.transfer.wire import FrameSocket, after

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PIECES = st.builds(
    Piece, position=U32, block_id=U32, offset=U32, length=st.integers(1, 2**32 - 1), generation=U64, checksum=U64
)
WRITES = st.builds(Write, transfer_id=U64, pieces=st.lists(PIECES, min_size=1, max_size=8).map(tuple))
FIRST_TOKENS = st.dictionaries(U32, U32, min_size=1, max_size=20).map(lambda tokens: tuple(sorted(tokens.items())))


def decode(frame: bytes) -> Message:
    header = decode_header(frame[: HEADER.size])
    body = frame[HEADER.size :]
    assert len(body) == header.body_bytes
    return decode_body(header.kind, body)


def header(
    *,
    magic: bytes = MAGIC,
    version: int = FORMAT_VERSION,
    kind: int = FrameType.ACK,
    reserved: int = 0,
    body: int = 0,
    payload: int = 0,
) -> bytes:
    return HEADER.pack(magic, version, kind, reserved, body, payload)


@given(WRITES)
def test_writes_come_back(write: Write) -> None:
    assert decode(encode(write)) == write


@given(U64, st.text(min_size=1, max_size=200), st.integers(1, 2**32 - 1), FIRST_TOKENS)
def test_commits_come_back(
    transfer_id: int, request_id: str, num_tokens: int, first_tokens: tuple[tuple[int, int], ...]
) -> None:
    commit = replace(commit_of(1, num_tokens, first_tokens), request_id=request_id)
    assert commit_from_message(decode(encode(commit_to_message(transfer_id, commit)))) == commit  # type: ignore[arg-type]


@given(st.sampled_from(list(FrameType)), st.binary(max_size=400))
def test_any_body_is_a_message_or_a_transfer_error(kind: FrameType, body: bytes) -> None:
    try:
        message = decode_body(kind, body)
    except TransferError:
        return
    assert decode(encode(message)) == message


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_any_header_is_within_limits_or_a_transfer_error(data: bytes) -> None:
    with pytest.raises(TransferError):
        decode_header(data)  # 4 random bytes are not the magic
    try:
        found = decode_header(MAGIC + bytes([FORMAT_VERSION]) + data[5:])
    except TransferError:
        return
    assert found.body_bytes <= MAX_BODY_BYTES
    assert found.payload_bytes <= (MAX_PAYLOAD_BYTES if found.kind is FrameType.WRITE else 0)


@given(WRITES, st.data())
def test_a_damaged_write_never_decodes_to_something_malformed(write: Write, data: st.DataObject) -> None:
    body = bytearray(encode(write)[HEADER.size :])
    index = data.draw(st.integers(0, len(body) - 1))
    body[index] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(body)))
    with pytest.raises(TransferError):
        decode_body(FrameType.WRITE, body[: cut - 1] if cut else b"")
    try:
        found = decode_body(FrameType.WRITE, body)
    except TransferError:
        return
    assert isinstance(found, Write)
    assert all(piece.length > 0 for piece in found.pieces)


@pytest.mark.parametrize(
    "data",
    [
        header(magic=b"HTTP"),
        header(kind=99),
        header(reserved=1),
        header(body=MAX_BODY_BYTES + 1),
        header(kind=FrameType.WRITE, payload=MAX_PAYLOAD_BYTES + 1),
        header(kind=FrameType.ACK, payload=1),
        header()[:-1],
        b"",
    ],
)
def test_bad_headers(data: bytes) -> None:
    with pytest.raises(TransferError):
        decode_header(data)


def test_another_format_version_is_a_refusal() -> None:
    with pytest.raises(HandshakeRefused, match="version 9"):
        decode_header(header(version=9))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameType.ACK, b'{"transfer_id": "1"}'),
        (FrameType.ACK, b'{"transfer_id": 1.0}'),
        (FrameType.ACK, b'{"transfer_id": -1}'),
        (FrameType.ACK, b'{"transfer_id": 18446744073709551616}'),
        (FrameType.ACK, b'{"transfer_id": 1, "more": 2}'),
        (FrameType.ACK, b"[1]"),
        (FrameType.ACK, b""),
        (FrameType.ACK, b'{"transfer_id": 1} '[:-2]),
        (FrameType.COMMIT, b'{"transfer_id":1,"request_id":"","num_tokens":1,"first_tokens":[[0,1]]}'),
        (FrameType.COMMIT, b'{"transfer_id":1,"request_id":"r","num_tokens":0,"first_tokens":[[0,1]]}'),
        (FrameType.COMMIT, b'{"transfer_id":1,"request_id":"r","num_tokens":1,"first_tokens":[]}'),
        (FrameType.COMMIT, b'{"transfer_id":1,"request_id":"r","num_tokens":1,"first_tokens":[[0,1],[0,2]]}'),
        (FrameType.COMMIT, b'{"transfer_id":1,"request_id":"r","num_tokens":1,"first_tokens":[[1,1],[0,2]]}'),
        (FrameType.PROOF, b'{"proof": "00"}'),
        (FrameType.WRITE, b""),
        (FrameType.WRITE, bytes(12)),
    ],
)
def test_bad_bodies(kind: FrameType, body: bytes) -> None:
    with pytest.raises(TransferError):
        decode_body(kind, body)


def test_every_message_has_a_frame_type_of_its_own() -> None:
    kinds = {FrameType(encode(model.model_construct(**_anything(model)))[5]) for model in get_args(JsonMessage)}
    assert kinds == set(FrameType) - {FrameType.WRITE}


def _anything(model: type[JsonMessage]) -> dict[str, object]:
    values: dict[str, object] = dict.fromkeys(model.model_fields, 1)
    for name, info in model.model_fields.items():
        if info.annotation is not int:
            values[name] = ((0, 1),) if name == "first_tokens" else "x"
    return values


def test_what_is_too_large_is_not_encoded() -> None:
    with pytest.raises(TransferError):
        encode(Write(1, (Piece(0, 0, 0, 1, 0, 0),)), payload_bytes=MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(TransferError):
        encode(Write(1, (Piece(0, 0, 0, 1, 0, 0),) * (MAX_PIECES * 4)))
    with pytest.raises(TransferError):
        commit_to_message(1, commit_of(1, num_tokens=0))
    many = tuple((index, 2**32 - 1) for index in range(MAX_CHOICES))
    assert encode(commit_to_message(1, commit_of(1, first_tokens=many)))
    with pytest.raises(TransferError):
        commit_to_message(1, commit_of(1, first_tokens=(*many, (MAX_CHOICES, 0))))


def test_the_largest_write_fits_into_a_frame() -> None:
    write = Write(2**64 - 1, (Piece(2**32 - 1, 2**32 - 1, 0, 1, 2**64 - 1, 2**64 - 1),) * MAX_PIECES)
    assert decode(encode(write)) == write


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=6), st.integers(0, 40))
def test_after_drops_exactly_that_many_bytes(parts: list[bytes], num_bytes: int) -> None:
    whole = b"".join(parts)
    num_bytes = min(num_bytes, len(whole))
    assert b"".join(after([memoryview(part) for part in parts], num_bytes)) == whole[num_bytes:]


@settings(max_examples=60, deadline=None)
@given(st.lists(WRITES | st.builds(Ack, transfer_id=U64), min_size=1, max_size=5), st.data())
def test_a_stream_cut_anywhere_ends_between_frames_or_raises(messages: list[Message], data: st.DataObject) -> None:
    frames = [encode(message) for message in messages]
    stream = b"".join(frames)
    cut = data.draw(st.integers(0, len(stream)))
    ours, theirs = socket.socketpair()
    with theirs, ours:
        theirs.sendall(stream[:cut])
        theirs.close()
        reader = FrameSocket(ours, stall_s=1.0)
        complete, position = 0, 0
        while position + len(frames[complete]) <= cut:
            frame = reader.receive(idle_s=1.0)
            assert frame is not None
            assert frame.message == messages[complete]
            position += len(frames[complete])
            complete += 1
            if complete == len(frames):
                break
        if position == cut:
            assert reader.receive(idle_s=1.0) is None
        else:
            with pytest.raises(TransferError):
                reader.receive(idle_s=1.0)


def test_a_frame_that_does_not_go_on_is_late() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        reader = FrameSocket(ours, stall_s=0.05)
        theirs.sendall(encode(Nack(transfer_id=1, reason="X", message="y"))[:-3])
        with pytest.raises(TransferError, match="in time"):
            reader.receive()
        with pytest.raises(TransferError, match="in time"):
            reader.receive(idle_s=0.05)


def test_sending_to_a_peer_that_takes_nothing_is_late() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        writer = FrameSocket(ours, stall_s=0.05)
        payload = [memoryview(bytes(MAX_PAYLOAD_BYTES))]
        with pytest.raises(TransferError, match="in time"):
            writer.send(Write(1, (Piece(0, 0, 0, 1, 0, 0),)), payload=payload)  # more than the socket holds


def test_sending_without_time_to_wait_does_not_wait() -> None:
    here, there = socket.socketpair()
    stream = FrameSocket(here, stall_s=30.0)
    started_s = time.monotonic()

    def send_for_ever() -> None:
        while True:
            stream.send(Opened(transfer_id=1), timeout_s=0.0)

    with pytest.raises(TransferError, match="in time"):
        send_for_ever()
    assert time.monotonic() - started_s < 15.0
    stream.close()
    there.close()


def test_hello_refuses_unknown_transports() -> None:
    with pytest.raises(TransferError):
        decode_body(FrameType.HELLO, b'{"transport":"nixl"}')
    assert "transport" in Hello.model_fields
