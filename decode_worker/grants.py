"""What a decode worker grants: how many blocks a request needs, and the right to fill them."""

from __future__ import annotations

import secrets

from twinstage.errors import KvExhausted
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.layout import KvLayout
from twinstage.types import KvEndpoint, KvGrant, SequenceSpec, WorkerDescription

TOKEN_BYTES = 32


def blocks_needed(spec: SequenceSpec, layout: KvLayout, *, pool_blocks: int) -> int:
    """Blocks for the tokens that are handed over.

    Raises KvExhausted when the request can never run in a pool of `pool_blocks`: the next token needs room, too.
    """
    tokens = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
    if layout.blocks_for(tokens + 1) > pool_blocks:
        raise KvExhausted(
            f"{tokens} tokens and the next one do not fit in the {pool_blocks} KV blocks of this decode worker"
        )
    return layout.blocks_for(tokens)


def make_grant(
    table: BlockTable,
    description: WorkerDescription,
    *,
    transfer_id: int,
    endpoints: tuple[KvEndpoint, ...],
    lease_s: float,
) -> KvGrant:
    """The right to fill the blocks of `table`, with a token that only this grant carries."""
    return KvGrant(
        worker_id=description.worker_id,
        epoch=description.epoch,
        transfer_id=transfer_id,
        generation=table.generation,
        token=secrets.token_bytes(TOKEN_BYTES),
        block_ids=table.block_ids,
        layout_fingerprint=description.kv_layout_fingerprint,
        endpoints=endpoints,
        lease_s=lease_s,
    )
