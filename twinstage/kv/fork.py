"""One prompt's blocks for several sequences that continue it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinstage.kv.block_table import BlockTable


def spare_blocks(num_tokens: int, *, num_choices: int, block_size: int) -> int:
    """Blocks that `fork` needs after those of the tokens: copies of the last one, unless that is complete."""
    return num_choices - 1 if num_tokens % block_size else 0


def fork(
    table: BlockTable,
    owners: Sequence[str],
    *,
    num_tokens: int,
    block_size: int,
    copy_block: Callable[[int, int], None],
) -> list[BlockTable]:
    """A table for each of `owners` with the keys and values of the first `num_tokens` tokens of `table`.

    That one counts as released. Complete blocks are shared; the last one, if it is partly filled, goes to the first
    owner, and the others get copies of it in the blocks that come after it. `copy_block` copies (source, target).
    """
    num_shared, rest = divmod(num_tokens, block_size)
    tables = table.divide(owners, num_shared, num_own=1 if rest else 0)
    if rest:
        sources = [part.block_ids[num_shared] for part in tables]
        for target in sources[1:]:
            copy_block(sources[0], target)
    return tables
