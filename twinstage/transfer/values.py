"""What the users of the KV channel see: who the ends are, what is handed over, and how it went."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.errors import TwinstageError
from twinstage.types import RequestId, WorkerId

GREETING_S = 5.0  # to connect, and again to shake hands; neither waits for anything to be computed


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """One end of a channel; only equal layouts and versions are paired. `epoch` is drawn at every start of a worker."""

    worker_id: WorkerId
    epoch: int
    layout_fingerprint: str
    protocol_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTimeouts:
    """The longest waits of either end, in seconds.

    connect      until a connection stands
    handshake    until both ends have proved who they are
    answer       until the receiver answers an offer or a commit
    stall        until a frame that has begun is complete, in either direction
    silence      until an end that says nothing, while a transfer is under way, is taken for lost
    shutdown     until peers have confirmed that they stopped writing, when a receiver closes
    """

    connect_s: float = GREETING_S
    handshake_s: float = GREETING_S
    answer_s: float = 10.0
    stall_s: float = 10.0
    silence_s: float = 10.0
    shutdown_s: float = 2.0

    @classmethod
    def of_lease(cls, lease_s: float) -> ChannelTimeouts:
        """Those of a worker that takes a peer for lost after `lease_s`."""
        greeting_s = min(lease_s, GREETING_S)
        return cls(connect_s=greeting_s, handshake_s=greeting_s, answer_s=lease_s, stall_s=lease_s, silence_s=lease_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverCommit:
    """The end of a transfer: `num_tokens` tokens have their KV in the blocks, and the generation goes on after them.

    `first_tokens` has, for each choice of the request that goes on, its index there and the id of its first new token.
    """

    request_id: RequestId
    num_tokens: int
    first_tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBlocks:
    """What arrived and was verified: the `num_blocks` blocks of the grant."""

    kv_bytes: int
    num_blocks: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverDone:
    """The receiver acknowledged `kv_bytes` bytes, `seconds` after the commit was asked for."""

    transport: str
    kv_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HandoverFailed:
    """The hand-over failed, or was aborted (`Cancelled`)."""

    error: TwinstageError


TransferOutcome = HandoverDone | HandoverFailed
