"""C4: a transfer is completed twice, late, or by somebody who means another one: one end, one release, no crash."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import xxhash

from case_parts import CasePair, check_next_is_right, raw_sender
from small_router import SmallRouter, spec_of
from transfer_ends import RawSender
from twinstage.engine.llm import LLM
from twinstage.errors import TransferError
from twinstage.transfer.messages import Abort, Ack, Commit, Nack
from twinstage.types import KvGrant, SequenceSpec, WorkerDescription

pytestmark = pytest.mark.xdist_group("cases")

ORDERS = sorted(set(itertools.permutations(["commit", "abort", "commit", "unknown", "old"])))
# All of them run in test_transfer_faults.py, on a receiver without a worker.
PICKED = random.Random(4).sample(ORDERS, 16)


async def test_completions_in_every_order_end_a_request_once(case_pair: CasePair, quick_reference: LLM) -> None:
    async with case_pair.router() as router:
        description = await router.decode.describe(timeout_s=5.0)
        finished = (await router.load(router.decode)).finished
        for number, order in enumerate(PICKED):
            finished += await _complete_in_order(router, description, f"c4-{number}", order)
            await router.all_blocks_free()
            assert (await router.load(router.decode)).finished == finished, order
        await check_next_is_right(router, quick_reference, "c4-after")


async def _complete_in_order(
    router: SmallRouter, description: WorkerDescription, name: str, order: tuple[str, ...]
) -> bool:
    """Whether the request was handed over."""
    spec = spec_of(name, 20, max_tokens=3)
    with router.session.subscribe(spec.request_id) as subscription:
        grant, _ = await router.session.reserve(spec, deadline_s=30.0)
        answers = await asyncio.to_thread(_act, grant, spec, description, order)
        committed_first = order.index("commit") < order.index("abort")
        assert answers.count(Ack(transfer_id=grant.transfer_id)) == committed_first, order
        assert sum(isinstance(answer, Nack) for answer in answers) == len(answers) - committed_first, order
        if committed_first:
            while (await subscription.receive()).totals is None:
                pass
        else:
            with pytest.raises(TransferError):
                await subscription.receive()
    return committed_first


def _act(grant: KvGrant, spec: SequenceSpec, description: WorkerDescription, order: tuple[str, ...]) -> list[object]:
    """What the receiver answers to each completion."""
    with raw_sender(grant, description) as sender:
        sender.open(grant)
        for position in range(len(grant.block_ids)):
            data = bytes(description.kv_block_bytes)  # numbers that a model can go on from
            sender.write(grant, position, data, xxhash.xxh3_64_intdigest(data))
        for act in order:
            _say(sender, grant, spec, act)
        return [sender.hear() for act in order if act != "abort"]


def _say(sender: RawSender, grant: KvGrant, spec: SequenceSpec, act: str) -> None:
    commit = Commit(
        transfer_id=grant.transfer_id,
        request_id=spec.request_id,
        num_tokens=len(spec.prompt_token_ids),
        first_tokens=((0, 5),),
    )
    match act:
        case "commit":
            sender.say(commit)
        case "abort":
            sender.say(Abort(transfer_id=grant.transfer_id))
        case "unknown":
            sender.say(commit.model_copy(update={"transfer_id": grant.transfer_id + 1}))
        case "old":
            sender.offer(grant, generation=grant.generation - 1)
