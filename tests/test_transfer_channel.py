"""The KV channel when nothing is wrong, and when transfers are given up: bytes, order, sharing and clean ends."""

from __future__ import annotations

import gc
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from transfer_ends import (
    SECRET,
    WAIT_S,
    Delegate,
    Ends,
    FakeReceiver,
    Results,
    commit_of,
    errors_of,
    fill_randomly,
    hear,
    identity,
    open_ends,
    open_receiver,
    short_directory,
    tls_for,
)
from twinstage.errors import Cancelled, ConfigError, IllegalTransition, IntegrityError, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.frames import encode
from twinstage.transfer.host import host_id
from twinstage.transfer.messages import Commit, Opened, Transport
from twinstage.transfer.peer import Peer
from twinstage.transfer.receiver import KvReceiver, ReceivedBlocks
from twinstage.transfer.sender import HandoverDone, HandoverFailed, KvSender
from twinstage.transfer.shm import PrivateSocket
from twinstage.types import KvEndpoint, RequestId

ALL = pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])


def spoken_of(transport: str) -> Transport:
    """What a transfer is said to have gone by."""
    return "shm" if transport == "shm" else "tcp"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test leaves a thread or a descriptor behind."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    left = set(threading.enumerate()) - threads
    assert not left, left
    kinds = {name: _target(name) for name in set(os.listdir("/proc/self/fd")) - descriptors}
    assert not {name: kind for name, kind in kinds.items() if kind}, kinds


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""  # the listing's own


@ALL
def test_a_grant_may_name_no_block_when_all_are_there_already(transport: str) -> None:
    with open_ends(transport, num_blocks=8) as ends:
        with pytest.raises(IntegrityError, match="no blocks"):
            ends.receiver.expect(ends.grant(()))
        grant = replace(ends.grant(()), num_cached_blocks=2)
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        with pytest.raises(StaleHandle):  # a block that is there already is beyond the grant
            transfer.write((0,), 0)
        commit = commit_of(grant.transfer_id)
        transfer.commit(commit)
        outcome = ends.results.wait(grant.transfer_id)
        assert isinstance(outcome, HandoverDone)
        assert outcome.kv_bytes == 0
        received = ReceivedBlocks(kv_bytes=0, num_blocks=0, transport=spoken_of(transport))
        assert ends.delegate.next() == (grant.transfer_id, commit, received)
        assert bytes(ends.target.block(0)) == bytes(4096)


@ALL
def test_one_transfer_arrives_byte_for_byte(transport: str) -> None:
    with open_ends(transport, num_blocks=8) as ends:
        grant = ends.grant((5, 2, 7))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([3, 1], 0)
        transfer.write([6], 2)
        commit = commit_of(grant.transfer_id, first_tokens=((0, 11), (2, 4)))
        transfer.commit(commit)
        outcome = ends.results.wait(grant.transfer_id)
        assert isinstance(outcome, HandoverDone)
        assert (outcome.transport, outcome.kv_bytes) == (spoken_of(transport), 3 * 4096)
        assert 0 < outcome.seconds < WAIT_S
        received = ReceivedBlocks(kv_bytes=3 * 4096, num_blocks=3, transport=spoken_of(transport))
        assert ends.delegate.next() == (grant.transfer_id, commit, received)
        assert ends.receiver.bytes_received == 3 * 4096
        for source_id, block_id in ((3, 5), (1, 2), (6, 7)):
            assert ends.target.block(block_id) == ends.source.block(source_id)
        for untouched in (0, 1, 3, 4, 6):
            assert bytes(ends.target.block(untouched)) == bytes(4096)


@ALL
@pytest.mark.parametrize("block_bytes", [24, 4096, 300_000, 2_500_001])
def test_block_sizes_from_tiny_to_larger_than_a_frame(transport: str, block_bytes: int) -> None:
    num_blocks = 1500 if block_bytes < 100 else 6
    with open_ends(transport, num_blocks=num_blocks, block_bytes=block_bytes) as ends:
        order = random.Random(3).sample(range(num_blocks), num_blocks)
        grant = ends.grant(tuple(order))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write(range(num_blocks), 0)
        transfer.commit(commit_of(grant.transfer_id))
        outcome = ends.results.wait(grant.transfer_id)
        assert isinstance(outcome, HandoverDone), outcome
        assert outcome.kv_bytes == num_blocks * block_bytes
        assert all(ends.target.block(order[index]) == ends.source.block(index) for index in range(num_blocks))


@ALL
def test_many_transfers_at_once_from_many_threads(transport: str) -> None:
    generator = random.Random(11)
    with open_ends(transport, num_blocks=400, block_bytes=20_000) as ends:
        plans = []
        free = list(range(400))
        generator.shuffle(free)
        while free:
            count = min(len(free), generator.randint(1, 24))
            blocks, free = tuple(free[:count]), free[count:]
            grant = ends.grant(blocks)
            ends.receiver.expect(grant)
            sources = [generator.randrange(400) for _ in blocks]
            plans.append((grant, sources, ends.results.callback(grant.transfer_id)))

        def run(plan_slice: list[tuple]) -> None:
            for grant, sources, callback in plan_slice:
                transfer = ends.sender.open(grant, callback)
                for position in range(0, len(sources), 5):
                    transfer.write(sources[position : position + 5], position)
                transfer.commit(commit_of(grant.transfer_id))

        threads = [threading.Thread(target=run, args=(plans[index::4],)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for grant, sources, _ in plans:
            assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)
            for source_id, block_id in zip(sources, grant.block_ids, strict=True):
                assert ends.target.block(block_id) == ends.source.block(source_id)
        assert ends.receiver.bytes_received == 400 * 20_000
        assert len({ends.delegate.next()[0] for _ in plans}) == len(plans)


@ALL
def test_a_small_transfer_is_not_kept_waiting_by_a_large_one(transport: str) -> None:
    memory = BlockMemory.create(num_blocks=64, block_bytes=1 << 20)
    with FakeReceiver(transport, memory) as (grant, accept):
        sender = KvSender(memory, identity("prefill-1", 8), secret=SECRET, tls=tls_for(transport))
        # Everything is queued before the connection stands, the large one first.
        for transfer_id, blocks in ((1, range(60)), (2, range(62, 63))):
            transfer = sender.open(
                replace(grant, transfer_id=transfer_id, block_ids=tuple(blocks)), lambda outcome: None
            )
            transfer.write(blocks, 0)
            transfer.commit(commit_of(transfer_id))
        stream = accept()
        assert [hear(stream).transfer_id, hear(stream).transfer_id] == [1, 2]  # type: ignore[attr-defined]
        stream.connection.sendmsg([memoryview(encode(Opened(transfer_id=1)) + encode(Opened(transfer_id=2)))])
        commits: list[int] = []
        while len(commits) < 2:
            message = hear(stream, None)
            commits += [message.transfer_id] if isinstance(message, Commit) else []
        assert commits == [2, 1]
        sender.close()
        stream.close()
    memory.close()


@ALL
def test_aborted_blocks_are_reused_and_hold_what_the_second_transfer_wrote(transport: str) -> None:
    """C1: whatever is in flight for the first, it must not land in the second's blocks."""
    generator = random.Random(5)
    with open_ends(transport, num_blocks=24, block_bytes=400_000) as ends:
        blocks = tuple(range(10))
        for attempt in range(15):
            first = ends.grant(blocks, generation=attempt * 2)
            ends.receiver.expect(first)
            transfer = ends.sender.open(first, ends.results.callback(first.transfer_id))
            transfer.write(range(10), 0)
            if generator.random() < 0.8:
                threading.Event().wait(generator.random() * 0.004)
            if generator.random() < 0.5:
                transfer.abort()
            assert ends.fenced(first.transfer_id).wait(WAIT_S)
            second = ends.grant(blocks, generation=attempt * 2 + 1)
            ends.receiver.expect(second)
            successor = ends.sender.open(second, ends.results.callback(second.transfer_id))
            successor.write(range(12, 22), 0)
            successor.commit(commit_of(second.transfer_id))
            assert isinstance(ends.results.wait(second.transfer_id), HandoverDone)
            assert all(ends.target.block(index) == ends.source.block(12 + index) for index in blocks)
            assert isinstance(errors_of(ends.results.wait(first.transfer_id)), Cancelled | StaleHandle)


@ALL
def test_abort_reports_once_and_leaves_the_others_alone(transport: str) -> None:
    with open_ends(transport, num_blocks=40, block_bytes=200_000) as ends:
        grants = [ends.grant(tuple(range(start, start + 10))) for start in (0, 10, 20)]
        transfers = []
        for grant in grants:
            ends.receiver.expect(grant)
            transfers.append(ends.sender.open(grant, ends.results.callback(grant.transfer_id)))
        for transfer in transfers:
            transfer.write(range(10), 0)
        transfers[1].abort()
        transfers[1].abort()
        assert isinstance(errors_of(ends.results.wait(grants[1].transfer_id)), Cancelled)
        transfers[1].write([0], 0)  # late, and without effect
        for index in (0, 2):
            transfers[index].commit(commit_of(grants[index].transfer_id))
            assert isinstance(ends.results.wait(grants[index].transfer_id), HandoverDone)
        assert ends.results.is_empty(grants[1].transfer_id)


@ALL
def test_revoked_before_anyone_came(transport: str) -> None:
    with open_ends(transport) as ends:
        grant = ends.grant((1, 2))
        ends.receiver.expect(grant)
        assert ends.fenced(grant.transfer_id).is_set()
        assert ends.fenced(grant.transfer_id).is_set(), "revoke is idempotent"
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0, 1], 0)
        transfer.commit(commit_of(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), StaleHandle)
        assert bytes(ends.target.block(1)) == bytes(4096)
        assert ends.delegate.events.empty()


@ALL
def test_what_the_delegate_raises_reaches_the_sender(transport: str) -> None:
    def refuse(transfer_id: int) -> None:
        raise StaleHandle("not mine")

    with open_ends(transport) as ends:
        ends.delegate.on_commit = refuse
        grant = ends.grant((3,))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(grant.transfer_id))
        error = errors_of(ends.results.wait(grant.transfer_id))
        assert isinstance(error, StaleHandle)
        assert str(error) == "not mine"


def test_shared_memory_is_preferred_and_tcp_is_the_way_out() -> None:
    memory = BlockMemory.create(num_blocks=4, block_bytes=64)
    delegate = Delegate()
    with open_receiver("both", memory, delegate) as receiver:
        assert [endpoint.transport for endpoint in receiver.endpoints] == ["shm", "tcp"]
        shm_endpoint, tcp_endpoint = receiver.endpoints
        elsewhere = KvEndpoint(transport="shm", address=shm_endpoint.address, host_id="another host")
        missing = KvEndpoint(transport="shm", address="/nowhere/s", host_id=host_id())
        assert _transport_used(memory, receiver, (shm_endpoint, tcp_endpoint), epoch_shift=1) == "shm"
        assert _transport_used(memory, receiver, (elsewhere, tcp_endpoint), epoch_shift=2) == "tcp"
        assert _transport_used(memory, receiver, (missing, tcp_endpoint), epoch_shift=3) == "tcp"
    memory.close()


def _transport_used(
    memory: BlockMemory, receiver: KvReceiver, endpoints: tuple[KvEndpoint, ...], *, epoch_shift: int
) -> str:
    sender = KvSender(memory, identity("prefill-1", 8), secret=SECRET)
    results = Results()
    ends = Ends(transport="both", source=memory, target=memory, receiver=receiver, sender=sender, delegate=Delegate())
    ends.ids = iter([epoch_shift])
    grant = ends.grant((1,))
    receiver.expect(grant)
    transfer = sender.open(replace(grant, endpoints=endpoints), results.callback(grant.transfer_id))
    transfer.write([0], 0)
    transfer.commit(commit_of(grant.transfer_id))
    outcome = results.wait(grant.transfer_id)
    sender.close()
    assert isinstance(outcome, HandoverDone), outcome
    return outcome.transport


def test_misuse_is_refused_where_it_happens() -> None:
    with open_ends("tcp") as ends:
        grant = ends.grant((1, 2))
        ends.receiver.expect(grant)
        with pytest.raises(IntegrityError):
            ends.receiver.expect(grant)
        with pytest.raises(IntegrityError, match="may still be written"):
            ends.receiver.expect(ends.grant((2, 3)))
        for blocks in ((), (1, 1), (99,)):
            with pytest.raises(IntegrityError):
                ends.receiver.expect(ends.grant(blocks))
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        with pytest.raises(StaleHandle):
            ends.sender.open(grant, lambda outcome: None)
        with pytest.raises(StaleHandle):
            transfer.write([0, 1], 1)
        transfer.write([0], 0)
        transfer.write([77], 1)  # a source block that does not exist
        transfer.commit(commit_of(grant.transfer_id))
        with pytest.raises(IllegalTransition):
            transfer.write([1], 1)
        with pytest.raises(IllegalTransition):
            transfer.commit(commit_of(grant.transfer_id))
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), StaleHandle)
        assert isinstance(ends.delegate.next()[1], TransferError)
    with pytest.raises(TransferError):
        ends.sender.open(grant, lambda outcome: None)


def test_an_empty_secret_is_refused() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    with pytest.raises(ConfigError):
        KvSender(memory, identity(), secret=b"")
    memory.close()


def test_a_port_in_use_is_a_configuration_error() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    with open_receiver("tcp", memory, Delegate()) as receiver:
        port = int(receiver.endpoints[0].address.rpartition(":")[2])
        second = KvReceiver(
            memory,
            identity(),
            secret=None,
            delegate=Delegate(),
            shm_directory=None,
            tcp_listen=("127.0.0.1", port),
            tcp_advertise=None,
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            second.start()
    memory.close()


@pytest.mark.parametrize(
    ("advertise", "pattern"),
    [(None, r"^:\d+$"), ("kv.example", r"^kv\.example:[1-9]\d*$"), ("kv.example:77", r"^kv\.example:77$")],
)
def test_advertised_address(advertise: str | None, pattern: str) -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    receiver = KvReceiver(
        memory,
        identity(),
        secret=None,
        delegate=Delegate(),
        shm_directory=None,
        tcp_listen=("0.0.0.0", 0),
        tcp_advertise=advertise,
    )
    receiver.start()
    address = receiver.endpoints[0].address
    receiver.close()
    receiver.close()
    memory.close()
    assert re.match(pattern, address), address


def test_closing_the_sender_fails_what_runs() -> None:
    with open_ends("shm") as ends:
        grant = ends.grant((1, 2))
        ends.receiver.expect(grant)
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        ends.sender.close()
        ends.sender.close()
        assert isinstance(ends.results.wait(grant.transfer_id), HandoverFailed)


def test_a_lost_connection_is_dialled_again() -> None:
    source = BlockMemory.create(num_blocks=4, block_bytes=64)
    target = BlockMemory.create(num_blocks=4, block_bytes=64)
    fill_randomly(source, seed=2)
    sender = KvSender(source, identity("prefill-1", 8), secret=SECRET)
    for round_number in (1, 2):
        with open_receiver("tcp", target, Delegate()) as receiver:
            ends = Ends(
                transport="tcp", source=source, target=target, receiver=receiver, sender=sender, delegate=Delegate()
            )
            grant = replace(ends.grant((round_number,)), transfer_id=round_number)
            receiver.expect(grant)
            transfer = sender.open(grant, ends.results.callback(round_number))
            transfer.write([0], 0)
            transfer.commit(commit_of(1, num_tokens=1))
            assert isinstance(ends.results.wait(round_number), HandoverDone)
    sender.close()
    source.close()
    target.close()


def test_a_connection_without_a_thread_takes_no_transfer_and_the_next_one_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(peer: Peer) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with open_ends("tcp") as ends:
        monkeypatch.setattr(Peer, "start", start)
        lost, good = ends.grant((1,)), ends.grant((2,))
        ends.receiver.expect(good)
        with pytest.raises(TransferError, match="no thread"):
            ends.sender.open(lost, ends.results.callback(lost.transfer_id))
        transfer = ends.sender.open(good, ends.results.callback(good.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(good.transfer_id))
        assert isinstance(ends.results.wait(good.transfer_id), HandoverDone)


def test_a_sender_that_cannot_hear_any_more_gives_the_connection_up_and_makes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def post(peer: Peer, said: object) -> int:
        monkeypatch.undo()
        raise KeyError("a bug")

    with open_ends("tcp") as ends:
        monkeypatch.setattr(Peer, "_post", post)
        lost, good = ends.grant((1,)), ends.grant((2,))
        ends.receiver.expect(lost)
        ends.receiver.expect(good)
        ends.sender.open(lost, ends.results.callback(lost.transfer_id))
        outcome = ends.results.wait(lost.transfer_id)
        assert isinstance(outcome, HandoverFailed)
        assert "could not be heard" in str(outcome.error)
        transfer = ends.sender.open(good, ends.results.callback(good.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(good.transfer_id))
        assert isinstance(ends.results.wait(good.transfer_id), HandoverDone)


# --- ways that lead nowhere -----------------------------------------------------------------------


@contextmanager
def _silent_endpoint() -> Iterator[KvEndpoint]:
    """A port at which connections are taken and nobody answers, as on a stopped worker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield KvEndpoint(transport="tcp", address=f"127.0.0.1:{listener.getsockname()[1]}", host_id="elsewhere")


def test_an_endpoint_that_leads_nowhere_does_not_hold_up_grants_with_better_ones() -> None:
    with open_ends("tcp") as ends, _silent_endpoint() as silent:
        lost, good = replace(ends.grant((1,)), endpoints=(silent,)), ends.grant((2,))
        for grant in (lost, good):
            ends.receiver.expect(grant)
        stuck = ends.sender.open(lost, ends.results.callback(lost.transfer_id))
        transfer = ends.sender.open(good, ends.results.callback(good.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(good.transfer_id))
        assert isinstance(ends.results.wait(good.transfer_id), HandoverDone)
        assert ends.results.is_empty(lost.transfer_id), "it still waits for the handshake"
        stuck.abort()


def test_an_abort_does_not_wait_for_a_connection_that_is_being_made() -> None:
    with open_ends("tcp") as ends, _silent_endpoint() as silent:
        grant = replace(ends.grant((1, 2)), endpoints=(silent,))
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        transfer.abort()
        assert not ends.results.is_empty(grant.transfer_id), "nobody reads the blocks"
        assert isinstance(errors_of(ends.results.wait(grant.transfer_id)), Cancelled)
        transfer.write([1], 1)
        transfer.abort()
        ends.sender.close()
        assert ends.results.is_empty(grant.transfer_id), "one result"


@ALL
def test_a_commit_that_cannot_be_said_harms_no_other_transfer(transport: str) -> None:
    with open_ends(transport) as ends:
        grants = [ends.grant((index,)) for index in range(2)]
        transfers = []
        for grant in grants:
            ends.receiver.expect(grant)
            transfers.append(ends.sender.open(grant, ends.results.callback(grant.transfer_id)))
            transfers[-1].write([0], 0)
        endless = replace(commit_of(grants[0].transfer_id), request_id=RequestId("x" * 5000))
        with pytest.raises(TransferError, match="encoded"):
            transfers[0].commit(endless)
        transfers[0].abort()
        assert isinstance(errors_of(ends.results.wait(grants[0].transfer_id)), Cancelled)
        transfers[1].commit(commit_of(grants[1].transfer_id))
        assert isinstance(ends.results.wait(grants[1].transfer_id), HandoverDone)


@ALL
def test_the_owner_hears_of_a_transfer_when_it_begins(transport: str) -> None:
    with open_ends(transport) as ends:
        heard: list[list[int]] = []
        ends.delegate.on_commit = lambda transfer_id: heard.append(list(ends.delegate.opened_ids))
        grant = ends.grant((1,))
        ends.receiver.expect(grant)
        assert ends.delegate.opened_ids == []
        transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
        transfer.write([0], 0)
        transfer.commit(commit_of(grant.transfer_id))
        assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)
        assert heard == [[grant.transfer_id]]


# --- what the dead leave behind -------------------------------------------------------------------


def _listen_and_die(parent: Path) -> None:
    """Another process listens below `parent` and is killed."""
    script = (
        "import os, pathlib, signal, sys; from twinstage.transfer.shm import PrivateSocket;"
        "PrivateSocket(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(parent)], check=False).returncode == -9


def test_the_socket_of_a_killed_worker_is_removed_by_the_next_one_and_no_other() -> None:
    with short_directory() as parent:
        living = PrivateSocket(parent)
        (parent / "kv-foreign").mkdir()
        (parent / "kv-foreign" / "s").write_text("not a socket")
        (parent / "kv-empty").mkdir()
        before = set(parent.iterdir())
        _listen_and_die(parent)
        (stale,) = set(parent.iterdir()) - before
        newcomer = PrivateSocket(parent)
        assert not stale.exists()
        assert set(parent.iterdir()) == before | {newcomer.path.parent}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(living.path))
        newcomer.close()
        living.close()
        assert {path.name for path in parent.iterdir()} == {"kv-foreign", "kv-empty"}
