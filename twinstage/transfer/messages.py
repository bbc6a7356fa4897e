"""The messages of the KV channel: strict models, so that a wrong type, range or field never gets past the decoder.

sender    Hello      Proof  Introduction      Open        Write ...  Commit         Abort          Revoked    Alive
receiver     Challenge   Proof        Welcome    Opened                   Ack|Nack         Revoke               Alive
                         Refused      Refused    Nack
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twinstage.errors import TransferError
from twinstage.transfer.values import HandoverCommit
from twinstage.types import RequestId

MAX_CHOICES = 1024  # of one request; routers allow fewer

Transport = Literal["shm", "tcp"]
Unsigned32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Unsigned64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Hello(_Body):
    """Sender: what I came for, and a number to be answered."""

    transport: Transport
    nonce: Digest


class Challenge(_Body):
    """Receiver: a number to be answered."""

    nonce: Digest


class Proof(_Body):
    """Sender, then receiver: I know the secret."""

    proof: Digest


class Introduction(_Body):
    """Sender: who I am, and whom I want. `proof` seals it."""

    protocol_version: Unsigned32
    worker_id: Name
    epoch: Unsigned64
    layout_fingerprint: Name
    target_worker_id: Name
    target_epoch: Unsigned64
    proof: Digest


class Welcome(_Body):
    """Receiver: who I am, and what my memory looks like. Over shm, its descriptor travels with this frame.

    `proof` seals it.
    """

    worker_id: Name
    epoch: Unsigned64
    layout_fingerprint: Name
    num_blocks: Annotated[int, Field(ge=1, lt=1 << 32)]
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 32)]
    proof: Digest


class Refused(_Body):
    """Receiver: the handshake failed; the connection ends."""

    reason: Name
    message: str = Field(max_length=1024)


class Open(_Body):
    """Sender: I want to use this grant. The token itself stays unsaid; `proof` binds it to this connection."""

    transfer_id: Unsigned64
    epoch: Unsigned64
    generation: Unsigned64
    proof: Digest


class Opened(_Body):
    """Receiver: you may write."""

    transfer_id: Unsigned64


class Commit(_Body):
    """Sender: all blocks are written; this is where decoding starts. Nothing of the transfer is written after it.

    `first_tokens` are (choice, token id), the choices ascending.
    """

    transfer_id: Unsigned64
    request_id: Name
    num_tokens: Annotated[int, Field(ge=1, lt=1 << 32)]
    first_tokens: Annotated[tuple[tuple[Unsigned32, Unsigned32], ...], Field(min_length=1, max_length=MAX_CHOICES)]

    @model_validator(mode="after")
    def _choices_differ(self) -> Self:
        choices = [choice for choice, _ in self.first_tokens]
        if any(before >= after for before, after in pairwise(choices)):
            raise ValueError("the choices must ascend")
        return self


class Ack(_Body):
    """Receiver: the blocks are verified and taken over."""

    transfer_id: Unsigned64


class Nack(_Body):
    """Receiver: the transfer failed."""

    transfer_id: Unsigned64
    reason: Name
    message: str = Field(max_length=1024)


class Abort(_Body):
    """Sender: I gave the transfer up. Nothing of it is written after this."""

    transfer_id: Unsigned64


class Revoke(_Body):
    """Receiver: stop writing, and say so."""

    transfer_id: Unsigned64


class Revoked(_Body):
    """Sender: no write of this transfer is running, and none will begin."""

    transfer_id: Unsigned64


class Alive(_Body):
    """Both: I am here. The sender says it while a transfer is under way, and the receiver answers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + length) of one block, and their xxh3_64."""

    position: int  # index into the grant's block_ids
    block_id: int
    offset: int
    length: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Write:
    """Sender: these pieces follow as the payload (tcp), or stand in the memory already (shm)."""

    transfer_id: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)


JsonMessage = (
    Hello
    | Challenge
    | Proof
    | Introduction
    | Welcome
    | Refused
    | Open
    | Opened
    | Commit
    | Ack
    | Nack
    | Abort
    | Revoke
    | Revoked
    | Alive
)
Message = JsonMessage | Write


def commit_to_message(transfer_id: int, commit: HandoverCommit) -> Commit:
    """The frame body for a hand-over. Raises TransferError when a value is out of range."""
    try:
        return Commit(
            transfer_id=transfer_id,
            request_id=commit.request_id,
            num_tokens=commit.num_tokens,
            first_tokens=commit.first_tokens,
        )
    except ValidationError as error:
        raise TransferError(f"the hand-over cannot be encoded: {error}"[:512]) from None


def commit_from_message(message: Commit) -> HandoverCommit:
    """The hand-over in a frame body."""
    return HandoverCommit(
        request_id=RequestId(message.request_id), num_tokens=message.num_tokens, first_tokens=message.first_tokens
    )
