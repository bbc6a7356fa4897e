"""Both ends of a KV channel in one process, for the tests of the transfer package."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import queue
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from twinstage.errors import TransferError, TwinstageError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer import shm, tcp
from twinstage.transfer.dial import Channel, Dialler
from twinstage.transfer.handshake import KvSecret, grant_proof, key_source, welcome
from twinstage.transfer.host import host_id
from twinstage.transfer.messages import Challenge, Commit, Hello, Message, Open, Opened, Piece, Proof, Write
from twinstage.transfer.receiver import ChannelTimeouts, HandoverCommit, KvIdentity, KvReceiver, ReceivedBlocks
from twinstage.transfer.sender import KvSender, TransferOutcome
from twinstage.transfer.shm import PrivateSocket
from twinstage.transfer.tls import KvTls, KvTlsSource, TlsSocket, make_kv_tls
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvEndpoint, KvGrant, RequestId, WorkerId

WAIT_S = 20.0  # longer than anything here takes; a test that waits for it has failed
SECRET = b"a secret of the tests"
LAYOUT = "layout-1"
FIRST_TOKENS = ((0, 7),)
FAST = ChannelTimeouts(connect_s=2.0, handshake_s=2.0, answer_s=5.0, stall_s=2.0, shutdown_s=2.0)


@functools.cache
def tls_of_one_authority() -> KvTls:
    return make_tls(trustme.CA())


def make_tls(
    authority: trustme.CA, trusted: trustme.CA | None = None, not_after: datetime.datetime | None = None
) -> KvTls:
    """A certificate of `authority`, for an end that lets those of `trusted` in, which is the same by default."""
    certificate = authority.issue_cert("any.worker", not_after=not_after)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, name) for name in ("certificate", "key", "ca")]
        certificate.cert_chain_pems[0].write_to_path(paths[0])
        certificate.private_key_pem.write_to_path(paths[1])
        (trusted or authority).cert_pem.write_to_path(paths[2])
        return make_kv_tls(certificate=paths[0], key=paths[1], ca=paths[2])


def tls_for(transport: str) -> KvTlsSource | None:
    """What both ends have when endpoints are called `transport`."""
    tls = tls_of_one_authority() if transport == "tls" else None
    return None if tls is None else lambda: tls


def identity(
    worker_id: str = "decode-1", epoch: int = 41, layout: str = LAYOUT, protocol_version: int = 1
) -> KvIdentity:
    return KvIdentity(
        worker_id=WorkerId(worker_id), epoch=epoch, layout_fingerprint=layout, protocol_version=protocol_version
    )


class Delegate:
    """Keeps what it was told; `on_commit` runs inside `committed`."""

    def __init__(self, on_commit: Callable[[int], None] = lambda transfer_id: None) -> None:
        self.on_commit = on_commit
        self.opened_ids: list[int] = []
        self.events: queue.Queue[tuple[int, object, ReceivedBlocks | None]] = queue.Queue()

    def opened(self, transfer_id: int) -> None:
        self.opened_ids.append(transfer_id)

    def committed(self, transfer_id: int, commit: HandoverCommit, received: ReceivedBlocks) -> None:
        self.events.put((transfer_id, commit, received))
        self.on_commit(transfer_id)

    def failed(self, transfer_id: int, error: TransferError) -> None:
        self.events.put((transfer_id, error, None))

    def next(self) -> tuple[int, object, ReceivedBlocks | None]:
        return self.events.get(timeout=WAIT_S)


class Results:
    """Outcomes of transfers, by name."""

    def __init__(self) -> None:
        self._queues: dict[int, queue.Queue[TransferOutcome]] = {}

    def callback(self, transfer_id: int) -> Callable[[TransferOutcome], None]:
        self._queues[transfer_id] = queue.Queue()
        return self._queues[transfer_id].put

    def wait(self, transfer_id: int) -> TransferOutcome:
        return self._queues[transfer_id].get(timeout=WAIT_S)

    def is_empty(self, transfer_id: int) -> bool:
        return self._queues[transfer_id].empty()


@dataclass(kw_only=True)
class Ends:
    """A receiver, a sender, and the memory of both."""

    transport: str
    source: BlockMemory
    target: BlockMemory
    receiver: KvReceiver
    sender: KvSender
    delegate: Delegate
    results: Results = field(default_factory=Results)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def grant(self, block_ids: tuple[int, ...], *, generation: int = 5, lease_s: float = 30.0) -> KvGrant:
        return KvGrant(
            worker_id=WorkerId("decode-1"),
            epoch=41,
            transfer_id=next(self.ids),
            generation=generation,
            token=os.urandom(32),
            block_ids=block_ids,
            layout_fingerprint=LAYOUT,
            endpoints=self.receiver.endpoints,
            lease_s=lease_s,
        )

    def fenced(self, transfer_id: int) -> threading.Event:
        """Revoke a transfer; the event is set when it is fenced."""
        event = threading.Event()
        self.receiver.revoke(transfer_id, event.set)
        return event


def commit_of(
    transfer_id: int, num_tokens: int = 3, first_tokens: tuple[tuple[int, int], ...] = FIRST_TOKENS
) -> HandoverCommit:
    request_id = RequestId(f"request-{transfer_id}")
    return HandoverCommit(request_id=request_id, num_tokens=num_tokens, first_tokens=first_tokens)


def fill_randomly(memory: BlockMemory, seed: int) -> None:
    generator = random.Random(seed)
    for block_id in range(memory.num_blocks):
        memory.block(block_id)[:] = generator.randbytes(memory.block_bytes)


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for a unix socket, wherever the tests run."""
    directory = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def open_receiver(
    transport: str,
    memory: BlockMemory,
    delegate: Delegate,
    *,
    secret: KvSecret = SECRET,
    timeouts: ChannelTimeouts = FAST,
    own: KvIdentity | None = None,
) -> Iterator[KvReceiver]:
    with short_directory() as directory:
        receiver = KvReceiver(
            memory,
            own or identity(),
            secret=secret,
            delegate=delegate,
            shm_directory=directory if transport in ("shm", "both") else None,
            tcp_listen=("127.0.0.1", 0) if transport in ("tcp", "tls", "both") else None,
            tcp_advertise=None,
            timeouts=timeouts,
            tls=tls_for(transport),
        )
        receiver.start()
        try:
            yield receiver
        finally:
            receiver.close()
            assert list(directory.iterdir()) == [], "the receiver left files behind"


@contextmanager
def open_ends(
    transport: str,
    *,
    num_blocks: int = 16,
    block_bytes: int = 4096,
    source: BlockMemory | None = None,
    timeouts: ChannelTimeouts = FAST,
) -> Iterator[Ends]:
    """Both ends, connected by `transport`; the source is filled with random bytes."""
    own_source = source or BlockMemory.create(num_blocks=num_blocks, block_bytes=block_bytes)
    target = BlockMemory.create(num_blocks=num_blocks, block_bytes=block_bytes)
    fill_randomly(own_source, seed=1)
    delegate = Delegate()
    try:
        with open_receiver(transport, target, delegate, timeouts=timeouts) as receiver:
            sender = KvSender(
                own_source, identity("prefill-1", 8), secret=SECRET, timeouts=timeouts, tls=tls_for(transport)
            )
            try:
                yield Ends(
                    transport=transport,
                    source=own_source,
                    target=target,
                    receiver=receiver,
                    sender=sender,
                    delegate=delegate,
                )
            finally:
                sender.close()
    finally:
        own_source.close()
        target.close()


class RawSender:
    """A sender made by hand, which can break every rule."""

    def __init__(self, grant: KvGrant, *, block_bytes: int, secret: KvSecret = SECRET, **who: object) -> None:
        own = identity("prefill-raw", 3, **who)  # type: ignore[arg-type]
        dialler = Dialler(
            identity=own,
            keys=key_source(secret),
            block_bytes=block_bytes,
            transports=("shm", "tcp"),
            timeouts=FAST,
            tls=tls_for(grant.endpoints[0].transport),
        )
        self.channel: Channel = dialler.dial(grant)

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.channel.stream.send(message, payload=[memoryview(payload)] if payload else [])

    def hear(self) -> Message | None:
        """The next message; None at the end of the stream."""
        frame = self.channel.stream.receive(idle_s=WAIT_S)
        return None if frame is None else frame.message

    def offer(self, grant: KvGrant, *, token: bytes | None = None, **changes: int) -> None:
        transfer_id = changes.get("transfer_id", grant.transfer_id)
        generation = changes.get("generation", grant.generation)
        proof = grant_proof(
            token or grant.token, self.channel.session.transcript, transfer_id=transfer_id, generation=generation
        )
        self.say(
            Open(transfer_id=transfer_id, epoch=changes.get("epoch", grant.epoch), generation=generation, proof=proof)
        )

    def open(self, grant: KvGrant) -> None:
        self.offer(grant)
        assert self.hear() == Opened(transfer_id=grant.transfer_id)

    def write(self, grant: KvGrant, position: int, data: bytes, checksum: int, **changes: int) -> None:
        """Write one block as the transport does it."""
        piece = Piece(
            position=position,
            block_id=changes.get("block_id", grant.block_ids[min(position, len(grant.block_ids) - 1)]),
            offset=changes.get("offset", 0),
            length=len(data),
            generation=changes.get("generation", grant.generation),
            checksum=checksum,
        )
        memory = self.channel.session.memory
        if memory is not None and 0 <= piece.offset < memory.block_bytes:
            memory.block(piece.block_id)[piece.offset : piece.offset + len(data)] = data
        self.say(Write(grant.transfer_id, (piece,)), b"" if memory is not None else data)

    def commit(self, transfer_id: int) -> None:
        self.say(Commit(transfer_id=transfer_id, request_id="raw", num_tokens=1, first_tokens=((0, 1),)))

    def close(self) -> None:
        self.channel.close()


@contextmanager
def raw_sender(ends: Ends, grant: KvGrant, **how: object) -> Iterator[RawSender]:
    sender = RawSender(grant, block_bytes=ends.target.block_bytes, **how)  # type: ignore[arg-type]
    try:
        yield sender
    finally:
        sender.close()


def raw_connection(receiver: KvReceiver) -> socket.socket:
    """A bare socket to a receiver's only endpoint."""
    endpoint = receiver.endpoints[0]
    connect = shm.connect if endpoint.transport == "shm" else tcp.connect
    return connect(endpoint.address, timeout_s=WAIT_S)


def errors_of(outcome: TransferOutcome) -> TwinstageError:
    error = getattr(outcome, "error", None)
    assert isinstance(error, TwinstageError), outcome
    return error


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; for what memory shows and nobody reports."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        threading.Event().wait(0.001)


class FakeReceiver:
    """A listening socket that does the handshake and leaves the rest to the test."""

    def __init__(self, transport: str, memory: BlockMemory) -> None:
        self._transport = transport
        self._memory = memory
        self._private = PrivateSocket(Path("/tmp")) if transport == "shm" else None
        self._listener = self._private.listener if self._private else socket.create_server(("127.0.0.1", 0))
        address = str(self._private.path) if self._private else f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.grant = KvGrant(
            worker_id=identity().worker_id,
            epoch=41,
            transfer_id=1,
            generation=2,
            token=b"token",
            block_ids=(1,),
            layout_fingerprint=LAYOUT,
            endpoints=(KvEndpoint(transport=transport, address=address, host_id=host_id()),),
            lease_s=30.0,
        )

    def accept(self) -> FrameSocket:
        self._listener.settimeout(WAIT_S)
        connection: socket.socket | TlsSocket = self._listener.accept()[0]
        if self._transport == "tls":
            assert isinstance(connection, socket.socket)
            connection = TlsSocket(connection, tls_of_one_authority, is_receiver=True)
        stream = FrameSocket(connection, stall_s=5.0)
        stream.secure()
        welcome(
            stream,
            identity=identity(),
            keys=(SECRET,),
            memory=self._memory,
            transport="shm" if self._transport == "shm" else "tcp",
            timeout_s=WAIT_S,
        )
        return stream

    def pretend(self) -> FrameSocket:
        """Accept and do the handshake without knowing the secret."""
        self._listener.settimeout(WAIT_S)
        stream = FrameSocket(self._listener.accept()[0], stall_s=5.0)
        said = [hear(stream)]
        stream.send(Challenge(nonce="1" * 64))
        said.append(hear(stream))
        stream.send(Proof(proof="0" * 64))
        assert [type(message) for message in said] == [Hello, Proof]
        return stream

    def __enter__(self) -> tuple[KvGrant, Callable[[], FrameSocket]]:
        return self.grant, self.accept

    def __exit__(self, *error: object) -> None:
        if self._private:
            self._private.close()
        self._listener.close()


def hear(stream: FrameSocket, payload_bytes: int | None = 0) -> object:
    """The next message; its payload is dropped."""
    frame = stream.receive(idle_s=WAIT_S)
    assert frame is not None
    assert payload_bytes is None or frame.payload_bytes == payload_bytes
    stream.discard(frame.payload_bytes)
    return frame.message
