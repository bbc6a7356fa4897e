"""The KV channel's receiver against any bytes: it answers or ends in time, and writes nothing outside the grant."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_ends import (
    FAST,
    WAIT_S,
    Ends,
    RawSender,
    commit_of,
    open_ends,
    raw_connection,
    raw_sender,
)
from twinstage.errors import TransferError
from twinstage.transfer.frames import HEADER, MAGIC, FrameType, encode
from twinstage.transfer.messages import Abort, Commit, Hello, Open, Piece, Revoked, Write
from twinstage.transfer.sender import HandoverDone

ALL = pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
BLOCK = 4096
GRANTED = (4, 9)
BRIEF = replace(FAST, handshake_s=0.3, stall_s=0.3)
BOUNDED = settings(max_examples=40, deadline=None, derandomize=True, database=None)

HELLO = Hello(transport="tcp", nonce="0" * 64)

PROPER = [Piece(0, 4, 0, BLOCK, 5, 0), Piece(1, 9, 0, BLOCK, 5, 0), Piece(0, 4, 0, 2048, 5, 0)]
WRONG: list[dict[str, int]] = [
    {},
    *({"block_id": block_id} for block_id in (3, 4, 5, 9, 15, 16, 2**32 - 1)),
    *({"position": position} for position in (0, 1, 2, 2**32 - 1)),
    *({"offset": offset} for offset in (1, 2048, BLOCK - 1, BLOCK, 2**32 - 1)),
    *({"length": length} for length in (1, BLOCK + 1, 20_000, 2**32 - 1)),
    {"generation": 4},
]
# At most one thing is wrong with a piece, besides its checksum, so that no check stands in for another.
PIECES = st.builds(lambda piece, wrong: replace(piece, **wrong), st.sampled_from(PROPER), st.sampled_from(WRONG))
STRANGE = st.one_of(
    st.lists(PIECES, min_size=1, max_size=2),
    st.lists(PIECES, min_size=1, max_size=2),
    st.sampled_from(["commit", "abort", "revoked", "open"]),
    st.binary(min_size=1, max_size=60),
)


def say(sender: RawSender, transfer_id: int, step: object, payload_bytes: int | None) -> None:
    """Say one strange thing; a payload has the right size unless `payload_bytes` is given."""
    send = sender.channel.stream.connection.send
    match step:
        case bytes():
            send(step)
        case "commit":
            sender.say(Commit(transfer_id=transfer_id, request_id="raw", num_tokens=1, first_tokens=((0, 1),)))
        case "abort":
            sender.say(Abort(transfer_id=transfer_id))
        case "revoked":
            sender.say(Revoked(transfer_id=transfer_id))
        case "open":
            sender.say(Open(transfer_id=transfer_id, epoch=41, generation=5, proof="0" * 64))
        case list():
            write = Write(transfer_id, tuple(step))
            size = min(write.num_bytes, 60_000) if payload_bytes is None else payload_bytes
            send(encode(write, payload_bytes=size) + os.urandom(size))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_whatever_a_sender_says_only_granted_blocks_are_written_and_the_transfer_ends(transport: str) -> None:
    with open_ends(transport, timeouts=BRIEF) as ends:
        untouched = {index: bytes(ends.target.block(index)) for index in set(range(16)) - set(GRANTED)}

        @BOUNDED
        @given(PIECES, st.lists(STRANGE, max_size=5), st.sampled_from([None, None, 0, 1]))
        def attack(first: Piece, others: list[object], payload_bytes: int | None) -> None:
            grant = ends.grant(GRANTED)
            ends.receiver.expect(grant)
            sender = RawSender(grant, block_bytes=BLOCK)
            sender.open(grant)
            with contextlib.suppress(OSError, TransferError):  # it may have been hung up on
                say(sender, grant.transfer_id, [first], 0 if transport == "shm" else None)
                for step in others:
                    say(sender, grant.transfer_id, step, 0 if transport == "shm" else payload_bytes)
            sender.close()
            _, outcome, received = ends.delegate.next()
            assert isinstance(outcome, TransferError), "no checksum was right"
            assert received is None
            assert ends.fenced(grant.transfer_id).wait(WAIT_S)
            assert {index: bytes(ends.target.block(index)) for index in untouched} == untouched

        attack()
        assert ends.receiver.bytes_received == 0
        assert_works(ends)


def assert_works(ends: Ends) -> None:
    grant = ends.grant((15,))
    ends.receiver.expect(grant)
    transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
    transfer.write([3], 0)
    transfer.commit(commit_of(grant.transfer_id))
    assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)


@st.composite
def openings(draw: st.DrawFn) -> bytes:
    """What a stranger may say first: noise, a header of any kind and size, or a Hello with some bytes changed."""
    kind = draw(st.sampled_from(["noise", "header", "hello"]))
    if kind == "noise":
        return draw(st.binary(min_size=1, max_size=300))
    if kind == "header":
        sizes = st.sampled_from([0, 1, 64, 65_536, 65_537, 2**32 - 1])
        data = HEADER.pack(
            MAGIC, draw(st.integers(0, 3)), draw(st.sampled_from(FrameType)), 0, draw(sizes), draw(sizes)
        )
        return data + draw(st.binary(max_size=100))
    data = bytearray(encode(HELLO))
    for index, flip in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(1, 255)), max_size=3)):
        data[index] ^= flip
    return bytes(data[: draw(st.integers(1, len(data)))])


@ALL
def test_whatever_a_stranger_says_first_he_is_hung_up_on_in_time_and_given_nothing(transport: str) -> None:
    with open_ends(transport, timeouts=BRIEF) as ends:

        @BOUNDED
        @given(openings(), st.booleans())
        def knock(opening: bytes, is_ended: bool) -> None:
            with raw_connection(ends.receiver) as connection:
                connection.settimeout(WAIT_S)
                with contextlib.suppress(OSError):  # it may have hung up already
                    connection.sendall(opening)
                    if is_ended:
                        connection.shutdown(socket.SHUT_WR)
                    assert not read_to_the_end(connection), "no descriptor"

        knock()
        assert_works(ends)
        assert ends.receiver.bytes_received == BLOCK


def read_to_the_end(connection: socket.socket) -> list[int]:
    """The descriptors that came; TimeoutError when the end does not come."""
    descriptors: list[int] = []
    with contextlib.suppress(ConnectionResetError):
        while True:
            data, fds, _, _ = socket.recv_fds(connection, 65_536, 4)
            descriptors += fds
            if not data:
                break
    return descriptors


@ALL
def test_a_handshake_has_one_deadline_however_slowly_it_trickles_in(transport: str) -> None:
    timeouts = replace(FAST, handshake_s=0.3, stall_s=60.0)
    with open_ends(transport, timeouts=timeouts) as ends, raw_connection(ends.receiver) as connection:
        connection.settimeout(0.05)
        started_s = time.monotonic()
        ended = False
        for byte in encode(HELLO.model_copy(update={"nonce": "x" * 1000})):  # a minute, at this rate
            try:
                ended = connection.recv(1) == b""
            except TimeoutError:
                ended = False
            except ConnectionError:  # a byte of ours lay there unread
                ended = True
            if ended or time.monotonic() - started_s > WAIT_S:
                break
            with contextlib.suppress(ConnectionError):  # the next look tells
                connection.send(bytes([byte]))
        assert ended


@ALL
def test_silent_strangers_keep_nobody_out_and_the_oldest_has_to_leave(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinstage.transfer.callers.MAX_HANDSHAKES", 3)
    monkeypatch.setattr("twinstage.transfer.callers.MAX_CONNECTIONS", 1)
    timeouts = replace(FAST, handshake_s=60.0)
    with open_ends(transport, timeouts=timeouts) as ends, contextlib.ExitStack() as stack:
        assert_works(ends)  # the sender's connection stands, and is the only one allowed
        strangers = []
        for _ in range(3):
            strangers.append(stack.enter_context(raw_connection(ends.receiver)))
            threading.Event().wait(0.05)  # so that they are accepted in this order
        assert all(is_turned_away(stranger) for stranger in strangers), "the proved have taken all places"
        monkeypatch.setattr("twinstage.transfer.callers.MAX_CONNECTIONS", 2)
        strangers = [stack.enter_context(raw_connection(ends.receiver)) for _ in range(4)]
        assert is_turned_away(strangers[0])
        for stranger in strangers[1:]:
            stranger.settimeout(0.1)
            with pytest.raises(TimeoutError):
                stranger.recv(1)
        assert_works(ends)
        grant = ends.grant((7,))
        ends.receiver.expect(grant)
        newcomer = RawSender(grant, block_bytes=BLOCK)  # in front of the strangers' noses
        newcomer.open(grant)
        newcomer.close()
        assert is_turned_away(strangers[1])


def test_who_fills_the_places_of_tcp_keeps_nobody_from_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinstage.transfer.callers.MAX_CONNECTIONS", 1)
    monkeypatch.setattr("twinstage.transfer.callers.MAX_HANDSHAKES", 1)
    with open_ends("both") as ends, contextlib.ExitStack() as stack:
        by_transport = {endpoint.transport: endpoint for endpoint in ends.receiver.endpoints}
        grants = [replace(ends.grant((block,)), endpoints=(by_transport["tcp"],)) for block in (4, 5)]
        first = stack.enter_context(raw_sender(ends, grants[0]))
        first.offer(grants[0])
        assert first.hear() is not None  # nobody waits for that transfer; who is answered has taken a place
        with pytest.raises(TransferError):
            RawSender(grants[1], block_bytes=BLOCK)
        newcomer = stack.enter_context(raw_sender(ends, replace(ends.grant((6,)), endpoints=(by_transport["shm"],))))
        assert newcomer.channel.transport == "shm"


def is_turned_away(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
