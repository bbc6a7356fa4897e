"""The KV channel against broken, hostile and dead peers: nothing is written that may not be, and nothing is left."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Sequence

import pytest

from raw_transfers import ALL, BLOCK, assert_channel_works, assert_untouched, checksum, raw_grant
from transfer_ends import (
    FAST,
    SECRET,
    WAIT_S,
    Ends,
    FakeReceiver,
    RawSender,
    commit_of,
    errors_of,
    eventually,
    hear,
    identity,
    open_ends,
    raw_sender,
    tls_for,
)
from twinstage.errors import ChecksumMismatch, StaleHandle, TransferError
from twinstage.kv.copying import copy_with_checksum
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.gate import WriteGate
from twinstage.transfer.messages import Abort, Ack, Nack, Open, Opened, Piece, Revoke, Revoked, Write
from twinstage.transfer.sender import HandoverDone, HandoverFailed, KvSender
from twinstage.transfer.tcp import receive_payload
from twinstage.transfer.values import ChannelTimeouts, TransferOutcome
from twinstage.transfer.wire import FrameSocket


@ALL
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


@ALL
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


@ALL
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
            sender.say(Write(grant.transfer_id, (piece,)), data if transport != "shm" else b"")
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


@ALL
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


@ALL
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


@ALL
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
            if transport != "shm":
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


@ALL
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


@ALL
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


@ALL
def test_late_answers_change_nothing_at_the_sender(transport: str) -> None:
    """C4 from the other side: a hand-made receiver answers twice, of the unknown, and of what ended."""
    results: list[object] = []
    source = BlockMemory.create(num_blocks=2, block_bytes=64)
    with FakeReceiver(transport, source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET, timeouts=FAST, tls=tls_for(transport))
        transfer = sender.open(grant, results.append)
        stream = receive()
        assert isinstance(hear(stream), Open)
        ours = grant.transfer_id
        stream.send(Opened(transfer_id=ours))
        transfer.write([0], 0)
        assert isinstance(hear(stream, 64 if transport != "shm" else 0), Write)
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


@ALL
@pytest.mark.parametrize("silent_at", ["open", "commit"])
def test_a_receiver_that_does_not_answer_is_noticed_by_the_deadline(transport: str, silent_at: str) -> None:
    source = BlockMemory.create(num_blocks=2, block_bytes=64)
    results: list[object] = []
    ended = threading.Event()
    timeouts = ChannelTimeouts(answer_s=0.2)
    with FakeReceiver(transport, source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET, timeouts=timeouts, tls=tls_for(transport))
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
