"""One request on a prefill worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prefill_worker.events import PrefillEvent
from prefill_worker.handoff import Handoff
from twinstage.errors import FieldViolation, InvalidRequest, KvExhausted
from twinstage.kv.layout import KvLayout
from twinstage.lifecycle import Lifecycle, PrefillPhase, prefill_lifecycle
from twinstage.types import KvGrant, RequestId, SequenceSpec


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """One request on its way through the worker. `key` is its name in the engine, unique even when a client retries."""

    key: RequestId
    spec: SequenceSpec
    handoff: Handoff | None = None
    lifecycle: Lifecycle[PrefillPhase] = field(default_factory=prefill_lifecycle)
    events: asyncio.Queue[PrefillEvent | None] = field(default_factory=asyncio.Queue)  # then None
    transfer_open: bool = False
    in_engine: bool = False


def check_fits(spec: SequenceSpec, grant: KvGrant | None, layout: KvLayout, *, pool_blocks: int) -> None:
    """Raise KvExhausted for a sequence that `pool_blocks` never hold, InvalidRequest for a grant of another size."""
    tokens = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
    needed = layout.blocks_for(tokens)
    if needed > pool_blocks:
        raise KvExhausted(f"{tokens} tokens need {needed} KV blocks, but this prefill worker has {pool_blocks}")
    if grant is not None and grant.num_cached_blocks + len(grant.block_ids) != needed:
        granted = f"{len(grant.block_ids)} blocks after {grant.num_cached_blocks} cached ones"
        wrong = f"has {granted}, but the sequence needs {needed}"
        raise InvalidRequest([FieldViolation("grant.block_ids", wrong)])
