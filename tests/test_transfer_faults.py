"""The KV channel against broken, hostile and dead peers: nothing is written that may not be, and nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import xxhash

from transfer_ends import (
    FAST,
    LAYOUT,
    SECRET,
    WAIT_S,
    Delegate,
    Ends,
    FakeReceiver,
    RawSender,
    commit_of,
    errors_of,
    eventually,
    fill_randomly,
    hear,
    identity,
    open_ends,
    open_receiver,
    raw_connection,
    raw_sender,
)
from twinstage.errors import (
    ChecksumMismatch,
    HandshakeRefused,
    InternalError,
    StaleHandle,
    TransferError,
)
from twinstage.kv.copying import copy_with_checksum
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.connection import Connection
from twinstage.transfer.frames import FORMAT_VERSION, HEADER, MAGIC, FrameType, encode
from twinstage.transfer.gate import WriteGate
from twinstage.transfer.handshake import Session, grant_proof
from twinstage.transfer.incoming import IncomingTable
from twinstage.transfer.messages import (
    Abort,
    Ack,
    Alive,
    Challenge,
    Hello,
    Nack,
    Open,
    Opened,
    Piece,
    Proof,
    Refused,
    Revoke,
    Revoked,
    Write,
)
from twinstage.transfer.receiver import KvReceiver
from twinstage.transfer.sender import HandoverDone, HandoverFailed, KvSender
from twinstage.transfer.shm import receive_descriptor
from twinstage.transfer.tcp import receive_payload
from twinstage.transfer.values import ChannelTimeouts, TransferOutcome
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvEndpoint, KvGrant, WorkerId

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])
BLOCK = 4096


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def assert_untouched(ends: Ends) -> None:
    assert all(bytes(ends.target.block(index)) == bytes(BLOCK) for index in range(ends.target.num_blocks))


def assert_channel_works(ends: Ends, block_id: int = 15) -> None:
    """A new transfer by the ordinary sender still goes through."""
    grant = ends.grant((block_id,))
    ends.receiver.expect(grant)
    transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
    transfer.write([3], 0)
    transfer.commit(commit_of(grant.transfer_id))
    assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)
    assert ends.target.block(block_id) == ends.source.block(3)


@BOTH
def test_blocks_that_change_on_the_way_are_refused(transport: str) -> None:
    """C20: the receiver checks what stands in its own memory."""
    with open_ends(transport) as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        data = os.urandom(BLOCK)
        sender.write(grant, 0, data, checksum(data))
        sender.write(grant, 1, bytes(BLOCK), checksum(data))
        sender.commit(grant.transfer_id)
        answer = sender.hear()
        assert isinstance(answer, Nack)
        assert answer.reason == ChecksumMismatch.reason
        transfer_id, error, received = ends.delegate.next()
        assert (transfer_id, received) == (grant.transfer_id, None)
        assert isinstance(error, ChecksumMismatch)
        assert ends.fenced(grant.transfer_id).wait(WAIT_S)
        assert ends.receiver.bytes_received == 0
        assert_channel_works(ends)


class raw_grant:  # noqa: N801 - a context manager
    """A grant that a hand-made sender has opened."""

    def __init__(self, ends: Ends, blocks: tuple[int, ...], **grant: int) -> None:
        self.grant = ends.grant(blocks, **grant)
        ends.receiver.expect(self.grant)
        self.sender = RawSender(self.grant, block_bytes=ends.target.block_bytes)

    def __enter__(self) -> tuple[KvGrant, RawSender]:
        self.sender.open(self.grant)
        return self.grant, self.sender

    def __exit__(self, *error: object) -> None:
        self.sender.close()


@BOTH
@pytest.mark.parametrize("spoiled", [0, 7], ids=["first", "last"])
def test_a_real_sender_whose_target_is_spoiled_learns_of_it(
    transport: str, spoiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one block is not in the pool as it was sent. Each block takes two frames."""
    arrived = itertools.count()

    def spoil(view: memoryview) -> None:
        if next(arrived) // 2 == spoiled:
            view[len(view) // 2] ^= 1

    def copy(target: memoryview, source: memoryview) -> int:
        checksum_of_source = copy_with_checksum(target, source)
        spoil(target)
        return checksum_of_source

    def receive(stream: FrameSocket, views: Sequence[memoryview], *, gate: WriteGate) -> bool:
        is_complete = receive_payload(stream, views, gate=gate)
        spoil(views[0])
        return is_complete

    monkeypatch.setattr("twinstage.transfer.shm.copy_with_checksum", copy)
    monkeypatch.setattr("twinstage.transfer.connection.receive_payload", receive)
    monkeypatch.setattr("twinstage.transfer.shm.ShmBlockWriter.turn_bytes", 1 << 20)
    with open_ends(transport, num_blocks=8, block_bytes=3 << 19) as ends:
        grant = ends.grant(tuple(range(8)))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write(range(8), 0)
        transfer.commit(commit_of(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), ChecksumMismatch)
        assert isinstance(ends.delegate.next()[1], ChecksumMismatch)
        assert ends.fenced(grant.transfer_id).wait(WAIT_S)
        assert ends.receiver.bytes_received == 0


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        {"block_id": 1},
        {"generation": 6},
        {"position": 2},
        {"position": 1},
        {"offset": 8},
        {"size": BLOCK + 1},
        {"size": 10},
    ],
    ids=str,
)
def test_a_write_outside_the_grant_fails_the_transfer_and_nothing_else(transport: str, changes: dict[str, int]) -> None:
    with open_ends(transport) as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        data = os.urandom(changes.get("size", BLOCK))
        piece = Piece(
            position=changes.get("position", 0),
            block_id=changes.get("block_id", 4),
            offset=changes.get("offset", 0),
            length=len(data),
            generation=changes.get("generation", grant.generation),
            checksum=checksum(data),
        )
        if changes == {"size": 10}:
            sender.write(grant, 0, data, checksum(data))
            sender.commit(grant.transfer_id)  # too few bytes show at the commit only
        else:
            # Over shared memory a sender that breaks the rules can scribble where it likes; what must not happen is
            # that the receiver takes it for a part of a transfer. Over TCP nothing reaches the memory.
            sender.say(Write(grant.transfer_id, (piece,)), data if transport == "tcp" else b"")
        answer = sender.hear()
        assert isinstance(answer, Nack), answer
        if transport == "shm" and changes != {"size": 10}:
            assert sender.hear() == Revoke(transfer_id=grant.transfer_id)
            assert isinstance(ends.delegate.next()[1], TransferError)
            fenced = ends.fenced(grant.transfer_id)
            assert not fenced.wait(0.05), "the sender may still be writing"
            sender.say(Revoked(transfer_id=grant.transfer_id))
            assert fenced.wait(WAIT_S)
        else:
            assert isinstance(ends.delegate.next()[1], TransferError)
            assert ends.fenced(grant.transfer_id).wait(WAIT_S)
        if changes != {"size": 10}:
            assert_untouched(ends)
        again = ends.grant((4, 9))
        ends.receiver.expect(again)
        sender.open(again)  # the connection lives
        assert_channel_works(ends)


@pytest.mark.parametrize(("transport", "payload_bytes"), [("tcp", 0), ("tcp", 32), ("tcp", 65), ("shm", 64)])
def test_a_payload_of_another_size_than_its_pieces_is_hung_up_on(transport: str, payload_bytes: int) -> None:
    with open_ends(transport) as ends, raw_grant(ends, (4,)) as (grant, sender):
        sender.say(Write(grant.transfer_id, (Piece(0, 4, 0, 64, 5, 1),)), b"\x07" * payload_bytes)
        assert sender.hear() is None
        assert "payload" in str(ends.delegate.next()[1])
        assert_untouched(ends)


@BOTH
def test_a_commit_before_every_byte_has_come_is_refused_even_if_the_bytes_happen_to_be_there(transport: str) -> None:
    with open_ends(transport) as ends, raw_grant(ends, (4,)) as (grant, sender):
        data = os.urandom(BLOCK)
        ends.target.block(4)[:] = data
        sender.write(grant, 0, data[:-1], checksum(data[:-1]))
        sender.commit(grant.transfer_id)
        answer = sender.hear()
        assert isinstance(answer, Nack)
        assert answer.reason == TransferError.reason
        assert "complete" in str(ends.delegate.next()[1])


@BOTH
@pytest.mark.parametrize("written", [2048, BLOCK])
def test_what_was_verified_cannot_be_written_again(transport: str, written: int) -> None:
    with open_ends(transport) as ends:
        with raw_grant(ends, (4,)) as (grant, sender):
            data = os.urandom(written)
            sender.write(grant, 0, data, checksum(data))
            sender.write(grant, 0, data, checksum(data))
            answer = sender.hear()
            assert isinstance(answer, Nack)
            assert "twice" in answer.message
        assert isinstance(ends.delegate.next()[1], TransferError)
        assert ends.fenced(grant.transfer_id).wait(WAIT_S)


@BOTH
@pytest.mark.parametrize(
    "how",
    [{"token": b"wrong"}, {"epoch": 40}, {"generation": 4}, {"transfer_id": 999}],
    ids=lambda how: next(iter(how)),
)
def test_a_stale_or_forged_handle_opens_nothing(transport: str, how: dict) -> None:
    """C5. The transfer itself is not harmed: who knows its token can still use it."""
    with open_ends(transport) as ends:
        grant = ends.grant((4, 9))
        ends.receiver.expect(grant)
        with raw_sender(ends, grant) as sender:
            sender.offer(grant, **how)
            answer = sender.hear()
            assert isinstance(answer, Nack)
            assert answer.reason == StaleHandle.reason
            data = os.urandom(BLOCK)
            if transport == "tcp":
                sender.write(grant, 0, data, checksum(data))
                sender.commit(grant.transfer_id)
                answer = sender.hear()
                assert isinstance(answer, Nack)
                assert_untouched(ends)
            sender.open(grant)
            sender.write(grant, 0, data, checksum(data))
            sender.write(grant, 1, data, checksum(data))
            sender.commit(grant.transfer_id)
            assert sender.hear() == Ack(transfer_id=grant.transfer_id)


@BOTH
def test_an_expired_grant_opens_nothing_and_commits_nothing(transport: str) -> None:
    with open_ends(transport) as ends:
        late = ends.grant((4,), lease_s=0.0)
        ends.receiver.expect(late)
        with raw_sender(ends, late) as sender:
            sender.offer(late)
            assert isinstance(sender.hear(), Nack)
            short = ends.grant((5,), lease_s=0.3)
            ends.receiver.expect(short)
            sender.open(short)
            data = os.urandom(BLOCK)
            sender.write(short, 0, data, checksum(data))
            threading.Event().wait(0.4)
            sender.commit(short.transfer_id)
            answer = sender.hear()
            assert isinstance(answer, Nack)
            assert answer.reason == StaleHandle.reason
            assert isinstance(ends.delegate.next()[1], StaleHandle)


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_completions_in_every_order_end_a_transfer_once(transport: str, seed: int) -> None:
    """C4: done, abort, done again, done for an unknown id, done of an old generation."""
    orders = list(itertools.permutations(["commit", "abort", "commit", "unknown", "old"]))[seed::6]
    with open_ends(transport) as ends:
        with raw_grant(ends, (0,)) as (warm_up, sender):
            sender.say(Abort(transfer_id=warm_up.transfer_id))
            ends.delegate.next()
            for number, order in enumerate(orders):
                _complete_in_order(ends, sender, order, generation=number + 7)
        assert_channel_works(ends)
        ends.delegate.next()
        assert ends.delegate.events.empty()


def _complete_in_order(ends: Ends, sender: RawSender, order: tuple[str, ...], *, generation: int) -> None:
    grant = ends.grant((4, 9), generation=generation)
    ends.receiver.expect(grant)
    sender.open(grant)
    data = os.urandom(BLOCK)
    sender.write(grant, 0, data, checksum(data))
    sender.write(grant, 1, data, checksum(data))
    answers_due = 0
    for act in order:
        match act:
            case "commit":
                sender.commit(grant.transfer_id)
            case "abort":
                sender.say(Abort(transfer_id=grant.transfer_id))
            case "unknown":
                sender.commit(10**12)
            case "old":
                sender.offer(grant, generation=generation - 1)
        answers_due += act != "abort"
    answers = [sender.hear() for _ in range(answers_due)]
    acknowledged = [answer for answer in answers if isinstance(answer, Ack)]
    committed_first = order.index("commit") < order.index("abort")
    assert acknowledged == ([Ack(transfer_id=grant.transfer_id)] if committed_first else [])
    assert sum(isinstance(answer, Nack) for answer in answers) == answers_due - len(acknowledged)
    transfer_id, _, received = ends.delegate.next()
    assert transfer_id == grant.transfer_id
    assert (received is not None) == committed_first
    fences: list[int] = []
    ends.receiver.revoke(grant.transfer_id, lambda: fences.append(1))
    assert fences == [1]
    assert ends.delegate.events.empty()


@BOTH
def test_late_answers_change_nothing_at_the_sender(transport: str) -> None:
    """C4 from the other side: a hand-made receiver answers twice, of the unknown, and of what ended."""
    results: list[object] = []
    source = BlockMemory.create(num_blocks=2, block_bytes=64)
    with FakeReceiver(transport, source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET, timeouts=FAST)
        transfer = sender.open(grant, results.append)
        stream = receive()
        assert isinstance(hear(stream), Open)
        ours = grant.transfer_id
        stream.send(Opened(transfer_id=ours))
        transfer.write([0], 0)
        assert isinstance(hear(stream, 64 if transport == "tcp" else 0), Write)
        transfer.commit(commit_of(ours))
        hear(stream)
        for message in (
            Ack(transfer_id=404),
            Ack(transfer_id=ours),
            Ack(transfer_id=ours),
            Nack(transfer_id=ours, reason="X", message=""),
            Opened(transfer_id=ours),
            Revoke(transfer_id=ours),
        ):
            stream.send(message)
        assert hear(stream) == Revoked(transfer_id=ours)
        assert len(results) == 1
        assert isinstance(results[0], HandoverDone)
        sender.close()
        stream.close()
    assert len(results) == 1
    source.close()


def test_a_receiver_that_says_more_than_it_was_asked_is_not_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing meanwhile, so that the writer has no time to hear it."""
    monkeypatch.setattr("twinstage.transfer.peer.MAX_UNHEARD", 100)
    source = BlockMemory.create(num_blocks=2, block_bytes=1 << 25)
    results: queue.Queue[TransferOutcome] = queue.Queue()
    with FakeReceiver("tcp", source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET)
        transfer = sender.open(grant, results.put)
        stream = receive()
        assert isinstance(hear(stream), Open)
        stream.send(Opened(transfer_id=grant.transfer_id))
        transfer.write([0], 0)
        assert isinstance(getattr(stream.receive(idle_s=WAIT_S), "message", None), Write)  # it goes on for longer
        for number in range(1000):
            stream.send(Ack(transfer_id=1000 + number))
        reader = f"kv-reader-{grant.worker_id}"
        eventually(lambda: all(thread.name != reader for thread in threading.enumerate()))
        (peer,) = sender._peers
        assert len(peer._inbox) <= 102
        stream.close()
        assert isinstance(results.get(timeout=WAIT_S), HandoverFailed)
        sender.close()
    source.close()


@BOTH
@pytest.mark.parametrize("silent_at", ["open", "commit"])
def test_a_receiver_that_does_not_answer_is_noticed_by_the_deadline(transport: str, silent_at: str) -> None:
    source = BlockMemory.create(num_blocks=2, block_bytes=64)
    results: list[object] = []
    ended = threading.Event()
    timeouts = ChannelTimeouts(answer_s=0.2)
    with FakeReceiver(transport, source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET, timeouts=timeouts)
        transfer = sender.open(grant, lambda outcome: (results.append(outcome), ended.set()))
        transfer.write([0], 0)
        transfer.commit(commit_of(1))
        stream = receive()
        assert isinstance(hear(stream), Open)
        if silent_at == "commit":
            stream.send(Opened(transfer_id=1))
        assert ended.wait(WAIT_S)
        assert isinstance(results[0], HandoverFailed)
        assert "did not answer in time" in str(results[0].error)
        sender.close()
        stream.close()
    source.close()


def test_a_lease_that_runs_out_ends_the_transfer_at_the_sender() -> None:
    with open_ends("tcp") as ends:
        grant = ends.grant((4,), lease_s=0.2)
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), StaleHandle)
        assert isinstance(ends.delegate.next()[1], TransferError)  # the sender told it


GARBAGE = {
    "noise": b"\x16\x03\x01" + bytes(range(200)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge body": HEADER.pack(MAGIC, FORMAT_VERSION, FrameType.HELLO, 0, 2**32 - 1, 0),
    "huge payload": HEADER.pack(MAGIC, FORMAT_VERSION, FrameType.WRITE, 0, 64, 2**32 - 1),
    "other version": HEADER.pack(MAGIC, 200, FrameType.HELLO, 0, 0, 0),
    "no handshake": encode(Open(transfer_id=1, epoch=41, generation=5, proof="0" * 64)),
    "write first": encode(Write(1, (Piece(0, 0, 0, 8, 5, 0),)), payload_bytes=8) + bytes(8),
    "empty": b"",
}


@BOTH
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_instead_of_a_handshake_is_hung_up_on(transport: str, name: str) -> None:
    with open_ends(transport) as ends:
        grant = ends.grant((0, 1))
        ends.receiver.expect(grant)
        with raw_connection(ends.receiver) as connection:
            with contextlib.suppress(OSError):  # it may hang up before all is said
                connection.sendall(GARBAGE[name])
                connection.shutdown(socket.SHUT_WR)
            _drain(connection)
        assert_untouched(ends)
        assert_channel_works(ends)
        ends.delegate.next()
        assert ends.delegate.events.empty()


def _drain(connection: socket.socket) -> None:
    """Read to the end, which must come."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


@BOTH
def test_random_bytes_at_any_time_never_reach_the_memory(transport: str) -> None:
    generator = random.Random(9)
    with open_ends(transport) as ends:
        for _ in range(20):
            with raw_grant(ends, (4, 9)) as (grant, sender):
                noise = bytearray(encode(Write(grant.transfer_id, (Piece(0, 4, 0, 64, 5, 1),)), payload_bytes=64))
                for _ in range(generator.randint(1, 4)):
                    noise[generator.randrange(len(noise))] ^= generator.randint(1, 255)
                sender.channel.stream.connection.send(bytes(noise[: generator.randint(1, len(noise))]))
                with contextlib.suppress(OSError):  # it may have hung up already
                    sender.channel.stream.connection.send(generator.randbytes(generator.randint(0, 500)))
            assert isinstance(ends.delegate.next()[1], TransferError)
            assert ends.fenced(grant.transfer_id).wait(WAIT_S)
        for index in set(range(16)) - {4}:
            assert bytes(ends.target.block(index)) == bytes(BLOCK)
        assert_channel_works(ends)


@BOTH
@pytest.mark.parametrize("message", [Opened(transfer_id=1), Ack(transfer_id=1), Revoke(transfer_id=1)], ids=repr)
def test_a_peer_in_the_wrong_role_is_hung_up_on(transport: str, message: object) -> None:
    with open_ends(transport) as ends, raw_grant(ends, (4,)) as (grant, sender):
        sender.say(message)  # type: ignore[arg-type]
        assert sender.hear() is None
        assert isinstance(ends.delegate.next()[1], TransferError)
        if transport == "shm":
            assert not ends.fenced(grant.transfer_id).wait(0.05), "this end hung up; the sender may still be writing"
        sender.close()
        assert ends.fenced(grant.transfer_id).wait(WAIT_S)


@BOTH
@pytest.mark.parametrize(
    ("sender_secret", "receiver_secret"), [(b"wrong", SECRET), (None, SECRET), (SECRET, None)], ids=str
)
def test_who_does_not_know_the_secret_stays_out(
    transport: str, sender_secret: bytes | None, receiver_secret: bytes | None
) -> None:
    memory = BlockMemory.create(num_blocks=4, block_bytes=BLOCK)
    with open_receiver(transport, memory, Delegate(), secret=receiver_secret) as receiver:
        error = errors_of(_attempt(memory, receiver, secret=sender_secret))
        assert isinstance(error, HandshakeRefused)
        assert "secret" in str(error)
    memory.close()


@BOTH
def test_a_sender_with_a_wrong_proof_is_given_nothing(transport: str) -> None:
    with open_ends(transport) as ends, raw_connection(ends.receiver) as connection:
        stream = FrameSocket(connection, stall_s=WAIT_S)
        stream.send(
            Hello(
                transport=transport,  # type: ignore[arg-type]
                protocol_version=1,
                worker_id="prefill-raw",
                epoch=1,
                layout_fingerprint=LAYOUT,
                target_worker_id="decode-1",
                target_epoch=41,
                nonce="0" * 64,
            )
        )
        assert isinstance(hear(stream), Challenge)
        stream.send(Proof(proof="0" * 64))
        if transport == "shm":
            frame, descriptor = receive_descriptor(stream, timeout_s=WAIT_S)
            with descriptor, pytest.raises(TransferError, match="no memory"):
                descriptor.attach(num_blocks=16, block_bytes=BLOCK)
            answer = frame.message
        else:
            answer = hear(stream)  # type: ignore[assignment]
        assert isinstance(answer, Refused)
        assert stream.receive(idle_s=WAIT_S) is None


@BOTH
def test_a_receiver_with_a_wrong_proof_is_sent_nothing(transport: str) -> None:
    memory = BlockMemory.create(num_blocks=2, block_bytes=64)
    outcomes: list[object] = []
    ended = threading.Event()
    fake = FakeReceiver(transport, memory)
    with fake as (grant, _):
        sender = KvSender(memory, identity("prefill-1", 8), secret=SECRET, timeouts=FAST)
        sender.open(grant, lambda outcome: (outcomes.append(outcome), ended.set()))
        stream = fake.pretend()
        assert ended.wait(WAIT_S)
        assert isinstance(outcomes[0], HandoverFailed)
        assert isinstance(outcomes[0].error, HandshakeRefused)
        assert stream.receive(idle_s=WAIT_S) is None
        sender.close()
        stream.close()
    memory.close()


@BOTH
def test_without_a_secret_on_both_sides_the_token_decides(transport: str) -> None:
    memory = BlockMemory.create(num_blocks=4, block_bytes=BLOCK)
    with open_receiver(transport, memory, Delegate(), secret=None) as receiver:
        assert isinstance(_attempt(memory, receiver, secret=None), HandoverDone)
    memory.close()


@BOTH
@pytest.mark.parametrize(
    ("own", "kind", "words"),
    [
        ({"layout": "layout-2"}, HandshakeRefused, "layout"),
        ({"protocol_version": 2}, HandshakeRefused, "version"),
        ({"epoch": 42}, StaleHandle, "epoch"),
        ({"worker_id": "decode-2"}, StaleHandle, "decode-2"),
    ],
    ids=["layout", "version", "epoch", "worker"],
)
def test_ends_that_do_not_fit_refuse_each_other(
    transport: str, own: dict, kind: type[TransferError], words: str
) -> None:
    memory = BlockMemory.create(num_blocks=4, block_bytes=BLOCK)
    with open_receiver(transport, memory, Delegate(), own=identity(**own)) as receiver:
        error = errors_of(_attempt(memory, receiver, secret=SECRET, expected=False))
        assert isinstance(error, kind)
        assert words in str(error)
    memory.close()


def _attempt(memory: BlockMemory, receiver: KvReceiver, *, secret: bytes | None, expected: bool = True) -> object:
    """One transfer of one block; its outcome."""
    outcomes: list[object] = []
    ended = threading.Event()
    grant = KvGrant(
        worker_id=identity().worker_id,
        epoch=41,
        transfer_id=1,
        generation=2,
        token=b"token",
        block_ids=(1,),
        layout_fingerprint="layout-1",
        endpoints=receiver.endpoints,
        lease_s=30.0,
    )
    if expected:
        receiver.expect(grant)
    sender = KvSender(memory, identity("prefill-1", 8), secret=secret, timeouts=FAST)
    transfer = sender.open(grant, lambda outcome: (outcomes.append(outcome), ended.set()))
    transfer.write([0], 0)
    transfer.commit(commit_of(1))
    assert ended.wait(WAIT_S)
    sender.close()
    return outcomes[0]


def test_a_grant_of_another_layout_is_not_used() -> None:
    with open_ends("tcp") as ends:
        grant = replace(ends.grant((1,)), layout_fingerprint="layout-9")
        ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), HandshakeRefused)


def test_no_common_transport_and_no_endpoint_are_refusals() -> None:
    with open_ends("tcp") as ends:
        for endpoints in ((), (KvEndpoint(transport="nixl", address="x", host_id="y"),)):
            grant = replace(ends.grant((1,)), endpoints=endpoints, epoch=next(ends.ids) + 100)
            ends.sender.open(grant, ends.results.callback(grant.transfer_id))
            assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), HandshakeRefused)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nohost", ":5", "127.0.0.1:99999999", "127.0.0.1:x"])
def test_an_address_that_cannot_be_reached_is_a_transfer_error(address: str) -> None:
    with open_ends("tcp") as ends:
        grant = replace(ends.grant((1,)), endpoints=(KvEndpoint(transport="tcp", address=address, host_id="y"),))
        ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), TransferError)


@BOTH
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_sender_that_goes_away_fails_its_transfers_and_fences_them(transport: str, reset: bool) -> None:
    with open_ends(transport) as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        second = ends.grant((6,))
        ends.receiver.expect(second)
        sender.open(second)
        data = os.urandom(BLOCK)
        sender.write(grant, 0, data, checksum(data))
        if reset and transport == "tcp":
            sender.channel.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.close()
        events = [ends.delegate.next() for _ in range(2)]
        assert {event[0] for event in events} == {grant.transfer_id, second.transfer_id}
        assert all(isinstance(event[1], TransferError) for event in events)
        for transfer_id in (grant.transfer_id, second.transfer_id):
            assert ends.fenced(transfer_id).wait(WAIT_S)
        assert_channel_works(ends)


def test_a_tcp_sender_that_stalls_inside_a_payload_is_fenced_at_once() -> None:
    with open_ends("tcp", timeouts=ChannelTimeouts(stall_s=30.0)) as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        frame = encode(Write(grant.transfer_id, (Piece(0, 4, 0, BLOCK, 5, 1),)), payload_bytes=BLOCK)
        sender.channel.stream.connection.send(frame + b"\x01" * 100)
        eventually(lambda: bytes(ends.target.block(4)[:100]) == b"\x01" * 100)
        assert ends.fenced(grant.transfer_id).is_set()
        assert sender.hear() == Revoke(transfer_id=grant.transfer_id)
        successor = ends.grant((4, 9), generation=6)
        ends.receiver.expect(successor)
        sender.channel.stream.connection.send(b"\x02" * (BLOCK - 100))  # late, and dropped
        sender.say(Revoked(transfer_id=grant.transfer_id))
        sender.open(successor)  # the connection lives
        assert bytes(ends.target.block(4)) == b"\x01" * 100 + bytes(BLOCK - 100)


def test_a_tcp_sender_that_stalls_inside_a_frame_loses_the_connection() -> None:
    timeouts = ChannelTimeouts(stall_s=0.2)
    with open_ends("tcp", timeouts=timeouts) as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        frame = encode(Write(grant.transfer_id, (Piece(0, 4, 0, BLOCK, 5, 1),)), payload_bytes=BLOCK)
        sender.channel.stream.connection.send(frame + bytes(100))
        assert isinstance(ends.delegate.next()[1], TransferError)
        assert sender.hear() is None


def test_a_revoked_shm_transfer_stays_fenced_off_until_the_sender_confirms() -> None:
    with open_ends("shm") as ends, raw_grant(ends, (4, 9)) as (grant, sender):
        data = os.urandom(BLOCK)
        sender.write(grant, 0, data, checksum(data))
        first, second = ends.fenced(grant.transfer_id), ends.fenced(grant.transfer_id)
        assert sender.hear() == Revoke(transfer_id=grant.transfer_id)
        assert not first.wait(0.1)
        sender.say(Revoked(transfer_id=grant.transfer_id))
        assert first.wait(WAIT_S)
        assert second.wait(WAIT_S)
        assert ends.delegate.events.empty(), "who revokes is not told of it"


@BOTH
def test_a_revocation_while_the_blocks_are_verified_wins(transport: str) -> None:
    """The commit has come, so nothing is written any more: fenced at once, and never handed to the owner."""
    table = IncomingTable(identity(), num_blocks=4, block_bytes=8)
    link = _QuietLink(transport)
    with open_ends(transport) as ends:
        grant = ends.grant((1, 2))
    table.expect(grant)
    proof = grant_proof(grant.token, b"", transfer_id=grant.transfer_id, generation=grant.generation)
    request = Open(transfer_id=grant.transfer_id, epoch=grant.epoch, generation=grant.generation, proof=proof)
    table.open(request, transcript=b"", link=link)
    transfer = table.begin_verifying(grant.transfer_id, link=link)
    assert transfer is not None
    assert table.revoke(grant.transfer_id, lambda: None) is None
    table.expect(replace(grant, transfer_id=77))  # the blocks are free
    assert not table.finish(transfer)
    assert not table.fail(grant.transfer_id, link=link)
    assert table.fence(grant.transfer_id, link=link) == []


class _QuietLink:
    def __init__(self, transport: str) -> None:
        self.transport = transport

    def stop_writing(self, transfer_id: int) -> None:
        raise AssertionError("the books do not talk")


@pytest.mark.parametrize("last_word", ["commit", "abort"])
def test_a_commit_or_abort_that_crosses_the_revocation_fences_too(last_word: str) -> None:
    with open_ends("shm") as ends, raw_grant(ends, (4,)) as (grant, sender):
        fenced = ends.fenced(grant.transfer_id)
        if last_word == "commit":
            sender.commit(grant.transfer_id)
        else:
            sender.say(Abort(transfer_id=grant.transfer_id))
        assert fenced.wait(WAIT_S)
        assert ends.delegate.events.empty()


def test_an_owner_that_fails_does_not_take_the_connection_down() -> None:
    def explode(transfer_id: int) -> None:
        raise RuntimeError("a bug of the owner")

    with open_ends("tcp") as ends:
        ends.delegate.on_commit = explode
        grant = ends.grant((4,))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), InternalError)
        ends.delegate.on_commit = lambda transfer_id: None
        assert_channel_works(ends)


def _send_for_ever(grant: KvGrant, ready: multiprocessing.synchronize.Event) -> None:
    """A process that writes and writes; it is killed in the middle of it."""
    source = BlockMemory.create(num_blocks=4, block_bytes=1 << 20)
    fill_randomly(source, seed=3)
    sender = RawSender(grant, block_bytes=1 << 20)
    sender.open(grant)
    block = sender.channel.writer._remote.block(grant.block_ids[0])  # type: ignore[attr-defined]
    for turn in range(10**9):
        block[:] = source.block(turn % 4)
        if turn == 50:
            ready.set()


def test_a_killed_process_counts_as_fenced_and_writes_no_more() -> None:
    context = multiprocessing.get_context("spawn")
    with open_ends("shm", num_blocks=4, block_bytes=1 << 20) as ends:
        grant = ends.grant((2,))
        ends.receiver.expect(grant)
        ready = context.Event()
        process = context.Process(target=_send_for_ever, args=(grant, ready))
        process.start()
        try:
            assert ready.wait(60)
            os.kill(process.pid or 0, signal.SIGSTOP)
            fenced = ends.fenced(grant.transfer_id)
            assert not fenced.wait(0.2), "a stopped process may go on to write"
            os.kill(process.pid or 0, signal.SIGKILL)
            assert fenced.wait(WAIT_S)
            seen = bytes(ends.target.block(2))
            assert seen != bytes(1 << 20)
            ends.target.block(2)[:] = bytes(1 << 20)
            threading.Event().wait(0.1)
            assert bytes(ends.target.block(2)) == bytes(1 << 20)
        finally:
            process.kill()
            process.join()


def test_a_sender_that_cannot_be_served_does_not_keep_the_next_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(connection: socket.socket) -> None:
        monkeypatch.undo()
        raise OSError("it broke already")

    with open_ends("tcp") as ends:
        monkeypatch.setattr("twinstage.transfer.receiver.tcp.tune", fail)
        host, port = ends.receiver.endpoints[0].address.split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            assert connection.recv(1) == b"", "hung up on"
        assert_channel_works(ends)


def test_a_receiver_that_closes_ends_the_transfers_of_its_senders() -> None:
    for transport in ("shm", "tcp"):
        with open_ends(transport) as ends:
            grant = ends.grant((4,))
            ends.receiver.expect(grant)
            transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
            transfer.write([0], 0)
            eventually(lambda: bytes(ends.target.block(4)) == bytes(ends.source.block(0)))
            ends.receiver.close()
            assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), TransferError)
            assert isinstance(ends.delegate.next()[1], TransferError)
            assert ends.fenced(grant.transfer_id).is_set()


def test_a_sender_that_does_not_leave_is_left_behind_unfenced() -> None:
    with open_ends("shm", timeouts=replace(FAST, shutdown_s=0.1)) as ends, raw_grant(ends, (4,)) as (grant, _):
        ends.receiver.close()
        assert isinstance(ends.delegate.next()[1], TransferError)
        assert not ends.fenced(grant.transfer_id).is_set()


def test_nobody_waits_for_a_sender_that_does_not_read() -> None:
    own, peer = socket.socketpair()
    sender = FrameSocket(peer, stall_s=FAST.stall_s)
    with contextlib.closing(BlockMemory.create(num_blocks=1, block_bytes=4096)) as memory, own, peer:
        connection = Connection(
            FrameSocket(own, stall_s=FAST.stall_s),
            session=Session(peer_worker_id=WorkerId("prefill-1"), peer_epoch=1, transcript=b""),
            transport="tcp",
            memory=memory,
            table=IncomingTable(identity(), num_blocks=1, block_bytes=4096),
            delegate=Delegate(),
            count_bytes=lambda _num_bytes: None,
            silence_s=WAIT_S,
        )
        with connection._send_lock:  # as its thread does while it sends
            _finishes(lambda: connection.stop_writing(7))
        connection._send(Alive())
        assert [hear(sender), hear(sender)] == [Alive(), Revoke(transfer_id=7)]
        with connection._send_lock:
            _finishes(connection.hang_up)
        assert sender.receive(idle_s=WAIT_S) is None


def _finishes(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S / 4)
    assert not thread.is_alive()
