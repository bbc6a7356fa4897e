"""How two ends of a channel find out that they fit together, and prove that they know the same secret.

    sender -> Hello          transport, nonce
    Challenge <- receiver    nonce
    sender -> Proof          HMAC-SHA256(secret, "sender", transcript), the transcript being Hello and Challenge, with
                             TLS also the receiver's certificate
    Proof <- receiver        HMAC-SHA256(secret, "receiver", transcript)
    sender -> Introduction   protocol version, identity, wanted worker and epoch; sealed
    Welcome <- receiver      identity, shape of the memory; sealed; over shm with the memory's descriptor

The secret never crosses the wire, both ends prove it before either says who it is, and a proof is worth nothing on
another connection. A receiver may accept several, so that secrets can be replaced. A seal is an HMAC of the transcript
and what the message says. Without a secret the key is empty: everyone who can connect is let in, and only the grant's
token protects a transfer. The channel is authenticated when it is set up; only TLS, below it, encrypts
it (`tls`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twinstage.errors import ConfigError, HandshakeRefused, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.messages import Challenge, Hello, Introduction, Proof, Refused, Transport, Welcome
from twinstage.transfer.reasons import error_from_reason
from twinstage.transfer.shm import receive_descriptor, send_with_descriptor
from twinstage.transfer.values import KvIdentity
from twinstage.transfer.wire import Frame, FrameSocket
from twinstage.types import KvGrant, WorkerId

MessageKind = TypeVar("MessageKind", Hello, Challenge, Proof, Introduction, Welcome)
SealedKind = TypeVar("SealedKind", Introduction, Welcome)

KeySource = Callable[[], Sequence[bytes]]
KvSecret = bytes | KeySource | None  # one, or what tells those that count now, or none

NO_KEY = (b"",)  # who can connect is let in
_NO_PROOF = "0" * 64


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


def key_source(secret: KvSecret) -> KeySource:
    """The keys of each handshake, of which the first is proved and all are accepted.

    Raises ConfigError for an empty secret, which would look like protection and be none.
    """
    if callable(secret):
        secrets_now = secret
        return lambda: secrets_now() or NO_KEY
    if secret is not None and not secret:
        raise ConfigError("the KV channel's secret is empty: put random bytes into the secret file, or give none")
    keys = NO_KEY if secret is None else (secret,)
    return lambda: keys


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
    transcript = _prove_to_receiver(stream, key=key, transport=transport, timeout_s=timeout_s)
    introduction = Introduction(
        protocol_version=identity.protocol_version,
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout_fingerprint=identity.layout_fingerprint,
        target_worker_id=grant.worker_id,
        target_epoch=grant.epoch,
        proof=_NO_PROOF,
    )
    stream.send(_sealed(introduction, key=key, transcript=transcript), timeout_s=timeout_s)
    if transport == "shm":
        frame, descriptor = receive_descriptor(stream, timeout_s=timeout_s)
        with descriptor:
            receiver = _opened(_expect(frame, Welcome), key=key, transcript=transcript)
            _check_receiver(receiver, identity=identity, grant=grant, block_bytes=block_bytes)
            memory = descriptor.attach(num_blocks=receiver.num_blocks, block_bytes=receiver.block_bytes)
    else:
        receiver = _opened(_expect(stream.receive(idle_s=timeout_s), Welcome), key=key, transcript=transcript)
        _check_receiver(receiver, identity=identity, grant=grant, block_bytes=block_bytes)
        memory = None
    return SenderSession(
        peer_worker_id=WorkerId(receiver.worker_id), peer_epoch=receiver.epoch, transcript=transcript, memory=memory
    )


def welcome(
    stream: FrameSocket,
    *,
    identity: KvIdentity,
    keys: Sequence[bytes],
    memory: BlockMemory,
    transport: Transport,
    timeout_s: float,
) -> Session:
    """The receiver's side. Raises TransferError; HandshakeRefused and StaleHandle are told to the sender first."""
    try:
        hello, key, transcript = _prove_to_sender(stream, keys=keys, timeout_s=timeout_s)
        sender = _opened(_expect(stream.receive(idle_s=timeout_s), Introduction), key=key, transcript=transcript)
        _check_sender(sender, identity=identity, asked_for=hello.transport, transport=transport)
    except (HandshakeRefused, StaleHandle) as error:
        stream.send(Refused(reason=error.reason, message=str(error)[:1024]), timeout_s=timeout_s)
        raise
    answer = Welcome(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout_fingerprint=identity.layout_fingerprint,
        num_blocks=memory.num_blocks,
        block_bytes=memory.block_bytes,
        proof=_NO_PROOF,
    )
    answer = _sealed(answer, key=key, transcript=transcript)
    if transport == "shm":
        send_with_descriptor(stream, answer, descriptor=memory.fd)
    else:
        stream.send(answer, timeout_s=timeout_s)
    return Session(peer_worker_id=WorkerId(sender.worker_id), peer_epoch=sender.epoch, transcript=transcript)


def _prove_to_receiver(stream: FrameSocket, *, key: bytes, transport: Transport, timeout_s: float) -> bytes:
    """Prove the secret, and see it proved; the transcript. Raises HandshakeRefused or TransferError."""
    hello = Hello(transport=transport, nonce=secrets.token_hex(32))
    stream.send(hello, timeout_s=timeout_s)
    transcript = _transcript(stream, hello, _expect(stream.receive(idle_s=timeout_s), Challenge))
    stream.send(Proof(proof=_proof(key, b"sender", transcript)), timeout_s=timeout_s)
    proof = _expect(stream.receive(idle_s=timeout_s), Proof)
    if not hmac.compare_digest(proof.proof, _proof(key, b"receiver", transcript)):
        raise HandshakeRefused("the receiver does not know this worker's KV secret")
    return transcript


def _prove_to_sender(stream: FrameSocket, *, keys: Sequence[bytes], timeout_s: float) -> tuple[Hello, bytes, bytes]:
    """See one of the secrets proved, and then prove it, too. Errors as above.

    Returns what the sender came for, the secret, and the transcript.
    """
    hello = _expect(stream.receive(idle_s=timeout_s), Hello)
    challenge = Challenge(nonce=secrets.token_hex(32))
    transcript = _transcript(stream, hello, challenge)
    stream.send(challenge, timeout_s=timeout_s)
    proof = _expect(stream.receive(idle_s=timeout_s), Proof)
    known = [key for key in keys if hmac.compare_digest(proof.proof, _proof(key, b"sender", transcript))]
    if not known:
        raise HandshakeRefused("the sender does not know this worker's KV secret")
    stream.send(Proof(proof=_proof(known[0], b"receiver", transcript)), timeout_s=timeout_s)
    return hello, known[0], transcript


def _expect(frame: Frame | None, kind: type[MessageKind]) -> MessageKind:
    """The message of `frame` when it is a `kind`. Raises what the peer refused with, or TransferError."""
    if frame is None:
        raise TransferError("the peer ended the stream during the handshake")
    if isinstance(frame.message, Refused):
        raise error_from_reason(frame.message.reason, frame.message.message)
    if not isinstance(frame.message, kind) or frame.payload_bytes:
        raise TransferError(f"expected a {kind.__name__} during the handshake, got a {type(frame.message).__name__}")
    return frame.message


def _check_receiver(receiver: Welcome, *, identity: KvIdentity, grant: KvGrant, block_bytes: int) -> None:
    if (receiver.worker_id, receiver.epoch) != (grant.worker_id, grant.epoch):
        raise StaleHandle(
            f"the grant is of worker {grant.worker_id}, epoch {grant.epoch}; "
            f"{receiver.worker_id}, epoch {receiver.epoch} answers at its address"
        )
    if receiver.layout_fingerprint != identity.layout_fingerprint or receiver.block_bytes != block_bytes:
        raise HandshakeRefused(
            f"KV layouts differ: {identity.layout_fingerprint} here, {receiver.layout_fingerprint} at "
            f"{receiver.worker_id}; both workers must serve the same model, revision, dtype and block size"
        )


def _check_sender(sender: Introduction, *, identity: KvIdentity, asked_for: Transport, transport: Transport) -> None:
    if sender.protocol_version != identity.protocol_version:
        raise HandshakeRefused(
            f"{sender.worker_id} speaks protocol version {sender.protocol_version}, "
            f"{identity.worker_id} speaks {identity.protocol_version}; run workers of one release"
        )
    if sender.layout_fingerprint != identity.layout_fingerprint:
        raise HandshakeRefused(
            f"KV layouts differ: {sender.layout_fingerprint} at {sender.worker_id}, {identity.layout_fingerprint} at "
            f"{identity.worker_id}; both workers must serve the same model, revision, dtype and block size"
        )
    if asked_for != transport:
        raise HandshakeRefused(f"{sender.worker_id} came for {asked_for} to the {transport} endpoint")
    if (sender.target_worker_id, sender.target_epoch) != (identity.worker_id, identity.epoch):
        raise StaleHandle(
            f"{sender.worker_id} looks for worker {sender.target_worker_id}, epoch {sender.target_epoch}; "
            f"this is {identity.worker_id}, epoch {identity.epoch}"
        )


def _sealed(message: SealedKind, *, key: bytes, transcript: bytes) -> SealedKind:
    """The message with the proof that who knows the secret says this on this connection."""
    return message.model_copy(update={"proof": _seal(message, key=key, transcript=transcript)})


def _opened(message: SealedKind, *, key: bytes, transcript: bytes) -> SealedKind:
    """The message, whose seal was found right. Raises HandshakeRefused."""
    if not hmac.compare_digest(message.proof, _seal(message, key=key, transcript=transcript)):
        raise HandshakeRefused(f"the {type(message).__name__} of the handshake was changed on its way")
    return message


def _seal(message: Introduction | Welcome, *, key: bytes, transcript: bytes) -> str:
    said = message.model_dump_json(exclude={"proof"}).encode()
    return _proof(key, type(message).__name__.lower().encode(), transcript + said)


def _transcript(stream: FrameSocket, hello: Hello, challenge: Challenge) -> bytes:
    said = hashlib.sha256(stream.binding)
    for message in (hello, challenge):
        body = message.model_dump_json().encode()
        said.update(len(body).to_bytes(8, "big"))
        said.update(body)
    return said.digest()


def _proof(key: bytes, role: bytes, transcript: bytes) -> str:
    return hmac.new(key, role + transcript, hashlib.sha256).hexdigest()
