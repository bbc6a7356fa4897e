"""The KV channel when an end stalls, takes its grant back, fails or dies: what was granted is fenced off."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from raw_transfers import ALL, BLOCK, assert_channel_works, checksum, raw_grant
from transfer_ends import (
    FAST,
    WAIT_S,
    Delegate,
    RawSender,
    commit_of,
    errors_of,
    eventually,
    fill_randomly,
    hear,
    identity,
    open_ends,
)
from twinstage.errors import InternalError, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.connection import Connection
from twinstage.transfer.frames import encode
from twinstage.transfer.handshake import Session, grant_proof
from twinstage.transfer.incoming import IncomingTable
from twinstage.transfer.messages import Abort, Alive, Open, Piece, Revoke, Revoked, Write
from twinstage.transfer.values import ChannelTimeouts
from twinstage.transfer.wire import FrameSocket
from twinstage.types import KvGrant, WorkerId


@ALL
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


@ALL
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
