"""Whose blocks are taken when others need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def choose_victims(tables: Sequence[Sequence[int]], holders: Sequence[int], *, wanted: int) -> list[int] | None:
    """Positions in `tables`, ascending, of those whose release frees `wanted` blocks; None when all are not enough.

    `tables` are the blocks of each, the first to be taken first; `holders` counts the tables that hold a block, by
    block. A block is free once all who hold it are released, so what several share is freed by them together, or not at
    all. Nobody is chosen in vain: without any one of the chosen, too few blocks would be free.
    """
    chosen: list[int] = []
    held: Counter[int] = Counter()  # by block: how many of the chosen hold it
    freed = 0
    for position, block_ids in enumerate(tables):
        if freed >= wanted:
            break
        chosen.append(position)
        held.update(block_ids)
        freed += sum(held[block_id] == holders[block_id] for block_id in block_ids)
    if freed < wanted:
        return None
    for position in reversed(chosen[:]):
        block_ids = tables[position]
        own = sum(held[block_id] == holders[block_id] for block_id in block_ids)
        if freed - own >= wanted:
            chosen.remove(position)
            held.subtract(block_ids)
            freed -= own
    return chosen
