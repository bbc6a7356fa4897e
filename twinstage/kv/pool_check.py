"""The proof of a block pool's books. Everything is read, nothing changed; the caller holds the pool's lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from twinstage.errors import IntegrityError
from twinstage.kv.prefix_index import PrefixIndex


def check_books(
    *,
    free: Iterable[int],
    cached: Iterable[int],
    tables: Iterable[tuple[str, int, Sequence[int]]],
    holders: Sequence[int],
    generations: Sequence[int],
    index: PrefixIndex,
    unnamed: Collection[int] = (),
) -> None:
    """Raise IntegrityError unless every block is free, cached, owned by one table, or sealed and held by some.

    `tables` are (owner, generation, block ids); `holders` and `generations` are by block, the generation of a block
    that no table owns being 0. `unnamed` are sealed, and the index does not know them.
    """
    claims: dict[int, list[tuple[str, int]]] = {}  # by block: who holds it, and under which generation
    for block_id in free:
        claims.setdefault(block_id, []).append(("the free list", 0))
        if block_id in index:
            raise IntegrityError(f"block {block_id} is free, but the prefix index knows it")
    for block_id in cached:
        claims.setdefault(block_id, []).append(("the cache", 0))
        if block_id not in index:
            raise IntegrityError(f"block {block_id} is cached, but the prefix index does not know it")
    nobodys = set(claims)
    for owner, generation, block_ids in tables:
        for block_id in block_ids:
            claims.setdefault(block_id, []).append((repr(owner), generation))
    if len(claims) != len(holders):
        raise IntegrityError(f"nobody holds blocks {sorted(set(range(len(holders))) - claims.keys())}")
    for block_id in unnamed:
        if block_id in index or block_id in nobodys or generations[block_id] != 0:
            raise IntegrityError(f"block {block_id} waits for a name, but it is known, free or owned")
    for block_id, claimed in claims.items():
        _check_block(block_id, claimed, generation=generations[block_id], is_nobodys=block_id in nobodys, index=index)
        expected = 0 if block_id in nobodys else len(claimed)
        if holders[block_id] != expected:
            raise IntegrityError(f"block {block_id} counts {holders[block_id]} tables, {expected} hold it")


def _check_block(
    block_id: int, claimed: Collection[tuple[str, int]], *, generation: int, is_nobodys: bool, index: PrefixIndex
) -> None:
    names = " and by ".join(holder for holder, _ in claimed)
    is_sealed = not is_nobodys and generation == 0
    if len(claimed) > 1 and not is_sealed:
        raise IntegrityError(f"block {block_id} is held by {names}")
    if block_id in index and generation != 0:
        raise IntegrityError(f"block {block_id} is in the prefix index and may be written under {generation}")
    allowed = {0} if is_sealed else {own for _, own in claimed}
    if generation not in allowed:
        raise IntegrityError(f"block {block_id} has generation {generation}, not {allowed}")
