"""The frames of the KV channel, and their only encoder and decoder.

    frame    header | body | payload
    header   magic, format version, type, body bytes, payload bytes      16 bytes, big-endian
    body     one message: strict JSON, except Write, which is packed
    payload  bytes of KV blocks; with Write over tcp only

A message is checked in full before anything acts on it: sizes against limits before a byte of the body is read,
then types, ranges and unknown fields. Whatever is wrong raises TransferError.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from pydantic import ValidationError

from twinstage.errors import HandshakeRefused, TransferError
from twinstage.transfer.messages import (
    Abort,
    Ack,
    Alive,
    Challenge,
    Commit,
    Hello,
    Introduction,
    JsonMessage,
    Message,
    Nack,
    Open,
    Opened,
    Piece,
    Proof,
    Refused,
    Revoke,
    Revoked,
    Welcome,
    Write,
)

MAGIC = b"TWKV"
FORMAT_VERSION = 4
MAX_BODY_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024  # larger writes are split, so that transfers that share a connection take turns
MAX_PIECES = 512  # of one Write; also keeps its views below the kernel's limit of 1024 buffers a call

HEADER = struct.Struct("!4sBBHII")
_WRITE_HEAD = struct.Struct("!QI")
_PIECE = struct.Struct("!IIIIQQ")


class FrameType(enum.IntEnum):
    """The types of frames; the numbers are the protocol."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    INTRODUCTION = 6
    OPEN = 16
    OPENED = 17
    WRITE = 18
    COMMIT = 19
    ACK = 20
    NACK = 21
    ABORT = 22
    REVOKE = 23
    REVOKED = 24
    ALIVE = 25


_MODELS: dict[FrameType, type[JsonMessage]] = {
    FrameType.HELLO: Hello,
    FrameType.CHALLENGE: Challenge,
    FrameType.PROOF: Proof,
    FrameType.WELCOME: Welcome,
    FrameType.INTRODUCTION: Introduction,
    FrameType.REFUSED: Refused,
    FrameType.OPEN: Open,
    FrameType.OPENED: Opened,
    FrameType.COMMIT: Commit,
    FrameType.ACK: Ack,
    FrameType.NACK: Nack,
    FrameType.ABORT: Abort,
    FrameType.REVOKE: Revoke,
    FrameType.REVOKED: Revoked,
    FrameType.ALIVE: Alive,
}
_FRAME_TYPES: dict[type[Message], FrameType] = {model: kind for kind, model in _MODELS.items()}


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header."""

    kind: FrameType
    body_bytes: int
    payload_bytes: int


def encode(message: Message, *, payload_bytes: int = 0) -> bytes:
    """Header and body of a frame whose payload, if any, the caller sends after them."""
    if isinstance(message, Write):
        kind, body = FrameType.WRITE, _encode_write(message)
    else:
        kind, body = _FRAME_TYPES[type(message)], message.model_dump_json().encode()
    if len(body) > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"a {kind.name} frame of {len(body)} + {payload_bytes} bytes is too large")
    return HEADER.pack(MAGIC, FORMAT_VERSION, kind, 0, len(body), payload_bytes) + body


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Check the 16 bytes of a header. Raises TransferError; HandshakeRefused for another format version."""
    if len(data) != HEADER.size:
        raise TransferError(f"a frame header has {HEADER.size} bytes, not {len(data)}")
    magic, version, kind_number, reserved, body_bytes, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise TransferError("the peer does not speak the KV channel's protocol")
    if version != FORMAT_VERSION:
        raise HandshakeRefused(f"the peer speaks format version {version} of the KV channel, this is {FORMAT_VERSION}")
    try:
        kind = FrameType(kind_number)
    except ValueError:
        raise TransferError(f"unknown frame type {kind_number}") from None
    if reserved != 0 or body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"malformed {kind.name} header: {body_bytes} body bytes, {payload_bytes} payload bytes")
    if payload_bytes and kind is not FrameType.WRITE:
        raise TransferError(f"a {kind.name} frame carries no payload")
    return Header(kind, body_bytes, payload_bytes)


def decode_body(kind: FrameType, body: bytes | bytearray) -> Message:
    """The message in a body. Raises TransferError."""
    if kind is FrameType.WRITE:
        return _decode_write(body)
    try:
        return _MODELS[kind].model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TransferError(f"malformed {kind.name} body: {where} {first['msg']}"[:512]) from None


def _encode_write(write: Write) -> bytes:
    parts = [_WRITE_HEAD.pack(write.transfer_id, len(write.pieces))]
    parts += [
        _PIECE.pack(piece.position, piece.block_id, piece.offset, piece.length, piece.generation, piece.checksum)
        for piece in write.pieces
    ]
    return b"".join(parts)


def _decode_write(body: bytes | bytearray) -> Write:
    if len(body) < _WRITE_HEAD.size:
        raise TransferError(f"malformed WRITE body of {len(body)} bytes")
    transfer_id, count = _WRITE_HEAD.unpack_from(body)
    if not 1 <= count <= MAX_PIECES or len(body) != _WRITE_HEAD.size + count * _PIECE.size:
        raise TransferError(f"malformed WRITE body: {count} pieces in {len(body)} bytes")
    pieces = tuple(Piece(*fields) for fields in _PIECE.iter_unpack(memoryview(body)[_WRITE_HEAD.size :]))
    if any(piece.length == 0 for piece in pieces):
        raise TransferError("malformed WRITE body: an empty piece")
    return Write(transfer_id, pieces)
