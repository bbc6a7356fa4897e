"""C13: every length around block borders, with every state of both prefix caches: the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from case_parts import BLOCK_TOKENS, CasePair, named
from small_router import SmallRouter, expected_of, spec_of
from twinstage.engine.llm import LLM
from twinstage.types import SequenceSpec

pytestmark = pytest.mark.xdist_group("cases")

LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1)
STATES = tuple(itertools.product(("none", "one block", "full"), ("none", "full")))  # of decode's and prefill's cache


async def test_what_the_caches_hold_changes_no_token(case_pair: CasePair, quick_reference: LLM) -> None:
    async with case_pair.router() as router:
        for length in LENGTHS:
            spec = spec_of(f"c13-{length}", length, max_tokens=4)
            tokens, _ = expected_of(quick_reference, spec)
            expected = tuple(token.token_id for token in tokens)
            for decode_has, prefill_has in STATES:
                await _prepare(router, spec, decode_has=decode_has, prefill_has=prefill_has)
                generation = await router.generate(spec)
                state = (length, decode_has, prefill_has)
                assert generation.token_ids == expected, state
                complete = length // BLOCK_TOKENS
                held = {"none": 0, "one block": min(1, complete), "full": complete}[decode_has]
                assert generation.cached_on_decode == held, state
                computed_before = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS if prefill_has == "full" else 0
                assert generation.cached_prompt_tokens == computed_before, state
                assert generation.computed_prompt_tokens == 0, state


async def _prepare(router: SmallRouter, spec: SequenceSpec, *, decode_has: str, prefill_has: str) -> None:
    """Let the caches hold nothing but what is asked for."""
    for worker in (router.prefill, router.decode):
        await worker.reset_prefix_cache(timeout_s=5.0)
    if decode_has == "full":
        await router.generate(named(spec, f"{spec.request_id}-warm"))
    elif decode_has == "one block":
        beginning = replace(spec, prompt_token_ids=spec.prompt_token_ids[:BLOCK_TOKENS])
        await router.generate(named(beginning, f"{spec.request_id}-beginning"))
    await router.prefill.reset_prefix_cache(timeout_s=5.0)
    if prefill_has == "full":
        alone = replace(named(spec, f"{spec.request_id}-alone"), max_tokens=1)
        with router.prefill.prefill(alone, None, timeout_s=20.0) as call:
            await call.first_token()
