"""C5: a handle that is stale, forged or somebody else's opens nothing, and the next request is right."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
import xxhash

from case_parts import CasePair, check_next_is_right, raw_sender
from small_router import SmallRouter, spec_of
from transfer_ends import RawSender
from twinstage.engine.llm import LLM
from twinstage.errors import StaleHandle, TransferError, TwinstageError
from twinstage.transfer.messages import Commit, Message, Nack, Piece, Revoke, Revoked, Write
from twinstage.types import KvGrant, SequenceSpec, WorkerDescription

pytestmark = pytest.mark.xdist_group("cases")


@pytest.mark.parametrize("handle", ["consumed", "expired", "unknown engine", "out of range", "another prompt's"])
async def test_a_handle_that_is_not_the_transfer_s_own(case_pair: CasePair, quick_reference: LLM, handle: str) -> None:
    async with case_pair.router() as router:
        description = await router.decode.describe(timeout_s=5.0)
        spec = spec_of(f"c5-{handle}", 40, max_tokens=6)
        with router.session.subscribe(spec.request_id) as subscription:
            grant, _ = await router.session.reserve(spec, deadline_s=0.2 if handle == "expired" else 30.0)
            if handle == "consumed":
                await router.prefill_with(spec, grant)
                while (await subscription.receive()).totals is None:
                    pass
            elif handle == "expired":
                with pytest.raises(TwinstageError):
                    await subscription.receive()
            answer = await asyncio.to_thread(_use, handle, grant, spec, description)
            assert answer == ("TRANSFER_FAILED" if handle == "another prompt's" else "STALE_HANDLE")
            if handle in ("out of range", "another prompt's"):
                with pytest.raises(TransferError):
                    await subscription.receive()
        await _end(router, spec)
        await check_next_is_right(router, quick_reference, f"c5-after-{handle}")


async def _end(router: SmallRouter, spec: SequenceSpec) -> None:
    router.session.abort(spec.request_id)
    await router.all_blocks_free()


def _use(handle: str, grant: KvGrant, spec: SequenceSpec, description: WorkerDescription) -> str:
    """The reason with which the receiver refuses."""
    if handle == "unknown engine":
        with pytest.raises(StaleHandle), raw_sender(replace(grant, epoch=grant.epoch + 1), description):
            pass
    with raw_sender(grant, description) as sender:
        if handle in ("consumed", "expired"):
            sender.offer(grant)
        elif handle == "unknown engine":
            sender.offer(grant, epoch=grant.epoch + 1)
        else:
            sender.open(grant)
            data = os.urandom(description.kv_block_bytes)
            checksum = xxhash.xxh3_64_intdigest(data)
            if handle == "out of range":
                return _write_nowhere(sender, grant, data, checksum)
            for position in range(len(grant.block_ids)):
                sender.write(grant, position, data, checksum)
            sender.say(
                Commit(transfer_id=grant.transfer_id, request_id="c5-another", num_tokens=40, first_tokens=((0, 5),))
            )
        return _reason(sender.hear())


def _write_nowhere(sender: RawSender, grant: KvGrant, data: bytes, checksum: int) -> str:
    """Announce a write to a block that the pool does not have; over tcp its bytes come along."""
    piece = Piece(
        position=0, block_id=10**6, offset=0, length=len(data), generation=grant.generation, checksum=checksum
    )
    is_tcp = sender.channel.transport == "tcp"
    sender.say(Write(grant.transfer_id, (piece,)), data if is_tcp else b"")
    reason = _reason(sender.hear())
    if not is_tcp:  # a writer of shared memory has to say that it stopped
        assert sender.hear() == Revoke(transfer_id=grant.transfer_id)
        sender.say(Revoked(transfer_id=grant.transfer_id))
    return reason


def _reason(answer: Message | None) -> str:
    assert isinstance(answer, Nack), answer
    return answer.reason
