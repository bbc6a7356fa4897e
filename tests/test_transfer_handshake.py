"""Whom the KV channel lets in: garbage, secrets, ends that do not fit together, and addresses that lead nowhere."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from dataclasses import replace

import pytest

from raw_transfers import BLOCK, BOTH, assert_channel_works, assert_untouched, raw_grant
from transfer_ends import (
    FAST,
    LAYOUT,
    SECRET,
    WAIT_S,
    Delegate,
    FakeReceiver,
    commit_of,
    errors_of,
    hear,
    identity,
    open_ends,
    open_receiver,
    raw_connection,
)
from twinstage.errors import HandshakeRefused, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.frames import FORMAT_VERSION, HEADER, MAGIC, FrameType, encode
from twinstage.transfer.handshake import KvSecret, _prove_to_receiver
from twinstage.transfer.messages import (
    Ack,
    Challenge,
    Hello,
    Introduction,
    Open,
    Opened,
    Piece,
    Proof,
    Refused,
    Revoke,
    Transport,
    Write,
)
from twinstage.transfer.receiver import KvReceiver
from twinstage.transfer.sender import HandoverDone, HandoverFailed, KvSender
from twinstage.transfer.shm import receive_descriptor
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvEndpoint, KvGrant

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
def test_a_secret_can_be_replaced_while_workers_run(transport: str) -> None:
    memory = BlockMemory.create(num_blocks=4, block_bytes=BLOCK)
    known = [SECRET]
    with open_receiver(transport, memory, Delegate(), secret=lambda: tuple(known)) as receiver:
        known.append(b"new")
        assert isinstance(_attempt(memory, receiver, secret=b"new"), HandoverDone)
        assert isinstance(_attempt(memory, receiver, secret=lambda: (SECRET, b"another")), HandoverDone)
        known.remove(SECRET)
        error = errors_of(_attempt(memory, receiver, secret=SECRET, expected=False))
        assert isinstance(error, HandshakeRefused)
    memory.close()


@BOTH
def test_a_sender_with_a_wrong_proof_is_given_nothing(transport: str) -> None:
    with open_ends(transport) as ends, raw_connection(ends.receiver) as connection:
        stream = FrameSocket(connection, stall_s=WAIT_S)
        stream.send(Hello(transport=transport, nonce="0" * 64))  # type: ignore[arg-type]
        challenge = hear(stream)
        assert isinstance(challenge, Challenge)
        stream.send(Proof(proof="0" * 64))
        if transport == "shm":
            frame, descriptor = receive_descriptor(stream, timeout_s=WAIT_S)
            with descriptor, pytest.raises(TransferError, match="no memory"):
                descriptor.attach(num_blocks=16, block_bytes=BLOCK)
            answer = frame.message
        else:
            answer = hear(stream)  # type: ignore[assignment]
        assert isinstance(answer, Refused)
        told = challenge.model_dump_json() + answer.model_dump_json()
        assert "decode-1" not in told, "who has proved nothing is not told whom it found"
        assert LAYOUT not in told
        assert stream.receive(idle_s=WAIT_S) is None


@BOTH
def test_an_introduction_that_was_changed_on_its_way_is_refused(transport: Transport) -> None:
    with open_ends(transport) as ends, raw_connection(ends.receiver) as connection:
        stream = FrameSocket(connection, stall_s=WAIT_S)
        _prove_to_receiver(stream, key=SECRET, transport=transport, timeout_s=WAIT_S)
        stream.send(
            Introduction(
                protocol_version=1,
                worker_id="prefill-raw",
                epoch=1,
                layout_fingerprint=LAYOUT,
                target_worker_id="decode-1",
                target_epoch=41,
                proof="0" * 64,
            )
        )
        answer = hear(stream)
        assert isinstance(answer, Refused)
        assert "Introduction of the handshake was changed" in answer.message
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


def _attempt(memory: BlockMemory, receiver: KvReceiver, *, secret: KvSecret, expected: bool = True) -> object:
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
