"""Signs of life on the KV channel: an end that is stopped is noticed by the other one, and a slow prompt is not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from transfer_ends import FAST, SECRET, WAIT_S, FakeReceiver, commit_of, hear, identity, open_ends
from transfer_ends import raw_sender as by_hand
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.messages import Alive, Open, Opened
from twinstage.transfer.sender import HandoverDone, HandoverFailed, KvSender
from twinstage.transfer.values import ChannelTimeouts

SILENCE_S = 0.8
BRISK = replace(FAST, silence_s=SILENCE_S)
BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])


@BOTH
def test_a_receiver_that_falls_silent_is_noticed_while_the_prompt_is_computed(transport: str) -> None:
    source = BlockMemory.create(num_blocks=2, block_bytes=64)
    results: list[HandoverFailed] = []
    ended = threading.Event()
    with FakeReceiver(transport, source) as (grant, receive):
        sender = KvSender(source, identity("prefill-1", 8), secret=SECRET, timeouts=BRISK)
        sender.open(grant, lambda outcome: (results.append(outcome), ended.set()))
        stream = receive()
        assert isinstance(hear(stream), Open)
        stream.send(Opened(transfer_id=1))
        for _ in range(4):  # longer than it may be silent
            assert hear(stream) == Alive()
            stream.send(Alive())
        assert not ended.is_set()
        silent_s = time.monotonic()
        assert ended.wait(WAIT_S)
        assert SILENCE_S / 2 < time.monotonic() - silent_s < SILENCE_S + 2.0
        assert f"silent for {SILENCE_S:g} s" in str(results[0].error)
        sender.close()
        stream.close()
    source.close()


@BOTH
def test_a_sender_that_falls_silent_is_noticed_while_its_transfer_is_open(transport: str) -> None:
    with open_ends(transport, timeouts=BRISK) as ends:
        grant = ends.grant((4, 9))
        ends.receiver.expect(grant)
        with by_hand(ends, grant) as sender:
            began_s = time.monotonic()
            time.sleep(1.5 * SILENCE_S)  # without a transfer it may be silent
            sender.open(grant)
            for _ in range(4):
                time.sleep(SILENCE_S / 2)
                sender.say(Alive())
                assert sender.hear() == Alive()
            assert ends.delegate.events.empty()
            silent_s = time.monotonic()
            transfer_id, error, _ = ends.delegate.next()
            assert silent_s - began_s > 3 * SILENCE_S
            assert time.monotonic() - silent_s < SILENCE_S + 2.0
            assert transfer_id == grant.transfer_id
            assert "did not answer in time" in str(error)
            fenced = ends.fenced(grant.transfer_id)
            if transport == "shm":  # it has the memory mapped, and may go on at any time
                assert not fenced.wait(0.2)
        assert fenced.wait(WAIT_S)


@BOTH
def test_two_ends_that_live_wait_for_each_other(transport: str) -> None:
    with open_ends(transport, timeouts=BRISK) as ends:
        for _ in range(2):
            grant = ends.grant((4,))
            ends.receiver.expect(grant)
            transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
            time.sleep(2 * SILENCE_S)  # a long prompt
            transfer.write([0], 0)
            transfer.commit(commit_of(grant.transfer_id))
            assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)
            time.sleep(1.5 * SILENCE_S)  # and nothing to do, after which the connection still stands


def test_a_lease_bounds_every_wait() -> None:
    timeouts = ChannelTimeouts.of_lease(1.5)
    assert {timeouts.connect_s, timeouts.handshake_s, timeouts.answer_s, timeouts.stall_s, timeouts.silence_s} == {1.5}
    assert ChannelTimeouts.of_lease(60.0).connect_s == 5.0
