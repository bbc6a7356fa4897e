"""What a decode worker grants: how many blocks a request needs, and the right to fill those that it lacks."""

from __future__ import annotations

import asyncio
import secrets

from twinstage.errors import KvExhausted
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.fork import spare_blocks
from twinstage.kv.layout import KvLayout
from twinstage.kv.prefix_index import HashChain, PrefixHasher
from twinstage.types import KvEndpoint, KvGrant, SequenceSpec, WorkerDescription

TOKEN_BYTES = 32
MAX_TOKENS_NAMED_AT_ONCE = 8192  # takes half a millisecond of the event loop


def num_handed_over(spec: SequenceSpec) -> int:
    """Tokens whose keys and values come from the prefill worker."""
    return len(spec.prompt_token_ids) + len(spec.resumed_token_ids)


def blocks_needed(spec: SequenceSpec, layout: KvLayout, *, pool_blocks: int, max_num_sequences: int) -> int:
    """Blocks for the tokens that are handed over, and after them what the fork into choices needs.

    Raises KvExhausted when the request can never run: in a pool of `pool_blocks`, where the next token needs room, too,
    or `max_num_sequences` at once.
    """
    tokens = num_handed_over(spec)
    spare = spare_blocks(tokens, num_choices=spec.num_choices, block_size=layout.block_size)
    needed = layout.blocks_for(tokens) + spare
    if max(needed, layout.blocks_for(tokens + 1)) > pool_blocks:
        choices = f" for each of {spec.num_choices} choices" if spec.num_choices > 1 else ""
        raise KvExhausted(
            f"{tokens} tokens and the next one{choices} do not fit in the {pool_blocks} KV blocks of this decode worker"
        )
    if spec.num_choices > max_num_sequences:
        raise KvExhausted(
            f"{spec.num_choices} choices are more than the {max_num_sequences} sequences that this decode worker "
            f"computes at once"
        )
    return needed


async def block_names(spec: SequenceSpec, hasher: PrefixHasher | None) -> HashChain | None:
    """The names of the prompt's complete blocks, under which this worker may have them; None without a prefix cache.

    Those of a long prompt are made on another thread, which gives up the interpreter's lock in between.
    """
    if hasher is None:
        return None
    token_ids = [*spec.prompt_token_ids, *spec.resumed_token_ids]
    if len(token_ids) <= MAX_TOKENS_NAMED_AT_ONCE:
        return hasher.chain(token_ids, salt=spec.cache_salt)
    return await asyncio.to_thread(hasher.chain, token_ids, salt=spec.cache_salt)


def make_grant(
    table: BlockTable,
    description: WorkerDescription,
    *,
    num_blocks: int,
    transfer_id: int,
    endpoints: tuple[KvEndpoint, ...],
    lease_s: float,
) -> KvGrant:
    """The right to fill those of the first `num_blocks` that `table` owns, with a token that only this grant carries.

    Those that it shares come first, and nobody may write them.
    """
    return KvGrant(
        worker_id=description.worker_id,
        epoch=description.epoch,
        transfer_id=transfer_id,
        generation=table.generation,
        token=secrets.token_bytes(TOKEN_BYTES),
        block_ids=table.block_ids[table.num_shared : num_blocks],
        num_cached_blocks=table.num_shared,
        layout_fingerprint=description.kv_layout_fingerprint,
        endpoints=endpoints,
        lease_s=lease_s,
    )
