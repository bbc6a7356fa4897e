"""C6: 64 prompts of one token at once, their metadata delayed and out of order: each gets its own first token."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from case_parts import BLOCK_BYTES, CasePair
from kv_link import KvLink
from small_router import expected_of, spec_of
from twinstage.engine.llm import LLM
from twinstage.types import SamplingParameters

pytestmark = pytest.mark.xdist_group("cases")

REQUESTS = 64


async def test_every_one_token_prompt_gets_its_own_first_token(case_pair: CasePair, quick_reference: LLM) -> None:
    specs = [
        replace(
            spec_of(f"c6-{index}", 1, max_tokens=3, sampling=SamplingParameters(temperature=0.8, seed=index)),
            prompt_token_ids=(3 + index,),
        )
        for index in range(REQUESTS)
    ]
    chance = random.Random(6)
    with KvLink(case_pair.transport, block_bytes=BLOCK_BYTES) as link:
        async with case_pair.router() as router:
            router.through = link.through
            link.delay_s = 0.001  # commits and acknowledgements come late and in lumps
            generations = await asyncio.gather(
                *(router.generate(spec, give_after_s=chance.uniform(0.0, 0.3)) for spec in specs)
            )
    for spec, generation in zip(specs, generations, strict=True):
        tokens, finish = expected_of(quick_reference, spec)
        assert generation.token_ids == tuple(token.token_id for token in tokens), spec.request_id
        assert generation.finish == finish
    assert len({generation.token_ids for generation in generations}) > REQUESTS // 2
