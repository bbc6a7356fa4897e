"""How two ends of a channel find out that they fit together, and prove that they know the same secret.

    sender -> Hello       identity, wanted worker and epoch, nonce
    Challenge <- receiver identity, shape of the memory, nonce
    sender -> Proof       HMAC-SHA256(secret, "sender", Hello, Challenge)
    Welcome <- receiver   HMAC-SHA256(secret, "receiver", Hello, Challenge); over shm with the memory's descriptor

The secret never crosses the wire, both ends prove it, and a proof is worth nothing on another connection. Without a
secret the key is empty: everyone who can connect is let in, and only the grant's token protects a transfer. The
channel is authenticated when it is set up; it is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TypeVar

from twinstage.errors import ConfigError, HandshakeRefused, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.messages import Challenge, Hello, Proof, Refused, Transport, Welcome
from twinstage.transfer.reasons import error_from_reason
from twinstage.transfer.shm import receive_descriptor, send_with_descriptor
from twinstage.transfer.values import KvIdentity
from twinstage.transfer.wire import Frame, FrameSocket
from twinstage.types import KvGrant, WorkerId

MessageKind = TypeVar("MessageKind", Hello, Challenge, Proof, Welcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A finished handshake: who is at the other end, and the digest of what both said, unique to this connection."""

    peer_worker_id: WorkerId
    peer_epoch: int
    transcript: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSession(Session):
    """The sender's view: over shm, `memory` is the receiver's memory, mapped here; the session's owner closes it."""

    memory: BlockMemory | None


def checked_secret(secret: bytes | None) -> bytes:
    """The key to prove. Raises ConfigError for an empty secret, which would look like protection and be none."""
    if secret is not None and not secret:
        raise ConfigError("the KV channel's secret is empty: put random bytes into the secret file, or give none")
    return secret or b""


def grant_proof(token: bytes, transcript: bytes, *, transfer_id: int, generation: int) -> str:
    """Proof of knowing a grant's token, bound to one connection, transfer and generation."""
    handle = transfer_id.to_bytes(8, "big") + generation.to_bytes(8, "big")
    return hmac.new(token, b"grant" + transcript + handle, hashlib.sha256).hexdigest()


def greet(
    stream: FrameSocket,
    *,
    identity: KvIdentity,
    key: bytes,
    grant: KvGrant,
    block_bytes: int,
    transport: Transport,
    timeout_s: float,
) -> SenderSession:
    """The sender's side. Raises HandshakeRefused, StaleHandle (another worker or epoch) or TransferError."""
    hello = Hello(
        transport=transport,
        protocol_version=identity.protocol_version,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout_fingerprint=identity.layout_fingerprint,
        target_worker_id=grant.worker_id,
        target_epoch=grant.epoch,
        nonce=secrets.token_hex(32),
    )
    stream.send(hello, timeout_s=timeout_s)
    challenge = _expect(stream.receive(idle_s=timeout_s), Challenge)
    _check_receiver(challenge, identity=identity, grant=grant, block_bytes=block_bytes)
    transcript = _transcript(hello, challenge)
    stream.send(Proof(proof=_proof(key, b"sender", transcript)), timeout_s=timeout_s)
    if transport == "shm":
        frame, descriptor = receive_descriptor(stream, timeout_s=timeout_s)
        with descriptor:
            _check_welcome(frame, key=key, transcript=transcript)
            memory = descriptor.attach(num_blocks=challenge.num_blocks, block_bytes=challenge.block_bytes)
    else:
        _check_welcome(stream.receive(idle_s=timeout_s), key=key, transcript=transcript)
        memory = None
    return SenderSession(
        peer_worker_id=WorkerId(challenge.worker_id), peer_epoch=challenge.epoch, transcript=transcript, memory=memory
    )


def welcome(
    stream: FrameSocket,
    *,
    identity: KvIdentity,
    key: bytes,
    memory: BlockMemory,
    transport: Transport,
    timeout_s: float,
) -> Session:
    """The receiver's side. Raises TransferError; HandshakeRefused and StaleHandle are told to the sender first."""
    try:
        hello = _expect(stream.receive(idle_s=timeout_s), Hello)
        _check_sender(hello, identity=identity, transport=transport)
        challenge = Challenge(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            layout_fingerprint=identity.layout_fingerprint,
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
            nonce=secrets.token_hex(32),
        )
        transcript = _transcript(hello, challenge)
        stream.send(challenge, timeout_s=timeout_s)
        proof = _expect(stream.receive(idle_s=timeout_s), Proof)
        if not hmac.compare_digest(proof.proof, _proof(key, b"sender", transcript)):
            raise HandshakeRefused("the sender does not know this worker's KV secret")
    except (HandshakeRefused, StaleHandle) as error:
        stream.send(Refused(reason=error.reason, message=str(error)[:1024]), timeout_s=timeout_s)
        raise
    answer = Welcome(proof=_proof(key, b"receiver", transcript))
    if transport == "shm":
        send_with_descriptor(stream, answer, descriptor=memory.fd)
    else:
        stream.send(answer, timeout_s=timeout_s)
    return Session(peer_worker_id=WorkerId(hello.worker_id), peer_epoch=hello.epoch, transcript=transcript)


def _expect(frame: Frame | None, kind: type[MessageKind]) -> MessageKind:
    """The message of `frame` when it is a `kind`. Raises what the peer refused with, or TransferError."""
    if frame is None:
        raise TransferError("the peer ended the stream during the handshake")
    if isinstance(frame.message, Refused):
        raise error_from_reason(frame.message.reason, frame.message.message)
    if not isinstance(frame.message, kind) or frame.payload_bytes:
        raise TransferError(f"expected a {kind.__name__} during the handshake, got a {type(frame.message).__name__}")
    return frame.message


def _check_receiver(challenge: Challenge, *, identity: KvIdentity, grant: KvGrant, block_bytes: int) -> None:
    if (challenge.worker_id, challenge.epoch) != (grant.worker_id, grant.epoch):
        raise StaleHandle(
            f"the grant is of worker {grant.worker_id}, epoch {grant.epoch}; "
            f"{challenge.worker_id}, epoch {challenge.epoch} answers at its address"
        )
    if challenge.layout_fingerprint != identity.layout_fingerprint or challenge.block_bytes != block_bytes:
        raise HandshakeRefused(
            f"KV layouts differ: {identity.layout_fingerprint} here, {challenge.layout_fingerprint} at "
            f"{challenge.worker_id}; both workers must serve the same model, revision, dtype and block size"
        )


def _check_sender(hello: Hello, *, identity: KvIdentity, transport: Transport) -> None:
    if hello.protocol_version != identity.protocol_version:
        raise HandshakeRefused(
            f"{hello.worker_id} speaks protocol version {hello.protocol_version}, "
            f"{identity.worker_id} speaks {identity.protocol_version}; run workers of one release"
        )
    if hello.layout_fingerprint != identity.layout_fingerprint:
        raise HandshakeRefused(
            f"KV layouts differ: {hello.layout_fingerprint} at {hello.worker_id}, {identity.layout_fingerprint} at "
            f"{identity.worker_id}; both workers must serve the same model, revision, dtype and block size"
        )
    if hello.transport != transport:
        raise HandshakeRefused(f"{hello.worker_id} came for {hello.transport} to the {transport} endpoint")
    if (hello.target_worker_id, hello.target_epoch) != (identity.worker_id, identity.epoch):
        raise StaleHandle(
            f"{hello.worker_id} looks for worker {hello.target_worker_id}, epoch {hello.target_epoch}; "
            f"this is {identity.worker_id}, epoch {identity.epoch}"
        )


def _check_welcome(frame: Frame | None, *, key: bytes, transcript: bytes) -> None:
    answer = _expect(frame, Welcome)
    if not hmac.compare_digest(answer.proof, _proof(key, b"receiver", transcript)):
        raise HandshakeRefused("the receiver does not know this worker's KV secret")


def _transcript(hello: Hello, challenge: Challenge) -> bytes:
    said = hashlib.sha256()
    for message in (hello, challenge):
        body = message.model_dump_json().encode()
        said.update(len(body).to_bytes(8, "big"))
        said.update(body)
    return said.digest()


def _proof(key: bytes, role: bytes, transcript: bytes) -> str:
    return hmac.new(key, role + transcript, hashlib.sha256).hexdigest()
