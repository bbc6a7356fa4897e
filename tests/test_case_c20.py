"""C20: tests of hand-overs are not vacuous: decode goes on from the bytes that crossed, and every one is checked."""

from __future__ import annotations

import pytest

from case_parts import BLOCK_BYTES, BLOCK_TOKENS, CasePair, check_next_is_right
from kv_link import KvLink, zeroed, zeroed_and_approved
from small_router import SmallRouter, expected_of, spec_of
from twinstage.engine.llm import LLM
from twinstage.errors import ChecksumMismatch, TransferError
from twinstage.types import SequenceSpec

pytestmark = pytest.mark.xdist_group("cases")

LENGTH = 70


async def fresh(router: SmallRouter, name: str) -> SequenceSpec:
    """A request of which no cache holds anything."""
    for worker in (router.prefill, router.decode):
        await worker.reset_prefix_cache(timeout_s=5.0)
    return spec_of(name, LENGTH, max_tokens=24)


async def test_every_byte_crosses_and_decode_computes_no_prompt_token(
    case_pair: CasePair, quick_reference: LLM
) -> None:
    with KvLink(case_pair.transport, block_bytes=BLOCK_BYTES) as link:
        async with case_pair.router() as router:
            router.through = link.through
            spec = await fresh(router, "c20")
            generation = await router.generate(spec)
            tokens, _ = expected_of(quick_reference, spec)
            assert generation.token_ids == tuple(token.token_id for token in tokens)
            assert generation.computed_prompt_tokens == 0
            assert generation.kv_bytes_received == -(-LENGTH // BLOCK_TOKENS) * BLOCK_BYTES
            assert link.frames > 0


async def test_blocks_that_are_zeroed_on_the_way_are_refused(case_pair: CasePair, quick_reference: LLM) -> None:
    with KvLink(case_pair.transport, block_bytes=BLOCK_BYTES) as link:
        async with case_pair.router() as router:
            router.through = link.through
            link.spoil = zeroed
            spec = await fresh(router, "c20-zeroed")
            with router.session.subscribe(spec.request_id) as subscription:
                grant, _ = await router.session.reserve(spec, deadline_s=30.0)
                with pytest.raises(TransferError):
                    await router.prefill_with(spec, link.through(grant))
                with pytest.raises(ChecksumMismatch):
                    await subscription.receive()
            link.run_free()
            await check_next_is_right(router, quick_reference, "c20-after")


async def test_with_checks_that_pass_the_output_would_change(case_pair: CasePair, quick_reference: LLM) -> None:
    with KvLink(case_pair.transport, block_bytes=BLOCK_BYTES) as link:
        async with case_pair.router() as router:
            router.through = link.through
            link.spoil = zeroed_and_approved
            spec = await fresh(router, "c20-approved")
            generation = await router.generate(spec)
            tokens, _ = expected_of(quick_reference, spec)
            assert generation.token_ids[0] == tokens[0].token_id  # it is prefill's
            assert generation.token_ids != tuple(token.token_id for token in tokens)
            await fresh(router, "")  # nobody shall find these blocks
