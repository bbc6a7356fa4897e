"""Which block holds the keys and values of which tokens, so that equal beginnings are computed and sent once.

A complete block is named by a hash of its own tokens and of the name of the block before it, and so by all tokens up to
its end:

    name 0 = H(root, tokens of block 0)      root = H(salt)
    name i = H(name i-1, tokens of block i)

H is keyed with the fingerprint of the KV layout, which covers the model: what another model or another layout computed
has other names. Requests with different salts share nothing.

H is BLAKE2b with 128 bits. A wrong hit needs two beginnings of one name: for that, even somebody who chooses the
prompts has to try about 2^64 of them. So a hit does not compare tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from twinstage.errors import IntegrityError

BlockHash = NewType("BlockHash", bytes)

_DIGEST_BYTES = 16
# Personalizations of BLAKE2b: no salt can have the hash of a block.
_ROOT, _BLOCK = b"twinstage root", b"twinstage block"


class PrefixHasher:
    """Names the blocks of sequences whose keys and values have the layout `fingerprint`, `block_size` tokens each."""

    def __init__(self, fingerprint: str, *, block_size: int) -> None:
        self.block_size = block_size
        self._key = hashlib.blake2b(fingerprint.encode(), digest_size=32).digest()

    def chain(self, token_ids: Sequence[int] = (), *, salt: str = "") -> HashChain:
        """The names of the complete blocks of `token_ids`."""
        root = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES, key=self._key, person=_ROOT).digest()
        chain = HashChain(self._key, root, block_size=self.block_size)
        chain.extend(token_ids)
        return chain


class HashChain:
    """The names of the complete blocks of one sequence that may grow; made by `PrefixHasher.chain`."""

    __slots__ = ("_block_size", "_key", "_last", "hashes")

    def __init__(self, key: bytes, root: bytes, *, block_size: int) -> None:
        self._key = key
        self._last = root
        self._block_size = block_size
        self.hashes: list[BlockHash] = []  # by position of the block

    @property
    def num_tokens(self) -> int:
        """Tokens that have a name so far."""
        return len(self.hashes) * self._block_size

    def copy(self) -> HashChain:
        """The same sequence, to be continued in another way."""
        chain = HashChain(self._key, self._last, block_size=self._block_size)
        chain.hashes = list(self.hashes)
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Name the complete blocks of `token_ids`, which follow the first `num_tokens`; a rest is left for later."""
        raw = memoryview(array("I", token_ids)).cast("B")  # 4 bytes a token, little-endian where this runs
        step = 4 * self._block_size
        for start in range(0, len(raw) - step + 1, step):
            digest = hashlib.blake2b(self._last, digest_size=_DIGEST_BYTES, key=self._key, person=_BLOCK)
            digest.update(raw[start : start + step])
            self._last = digest.digest()
            self.hashes.append(BlockHash(self._last))


@dataclass(frozen=True, slots=True)
class PrefixLookups:
    """Blocks whose content was looked up in the prefix index, and how many of them were found."""

    wanted: int = 0
    found: int = 0

    def plus(self, *, wanted: int, found: int) -> PrefixLookups:
        return PrefixLookups(self.wanted + wanted, self.found + found)


class PrefixIndex:
    """Blocks by name, and names by block: one to one. Not thread-safe; the block pool guards it with its lock."""

    def __init__(self) -> None:
        self._block_ids: dict[BlockHash, int] = {}
        self._hashes: dict[int, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_ids)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashes

    def match(self, hashes: Sequence[BlockHash], *, multiple: int = 1) -> list[int]:
        """The blocks of the longest known beginning of `hashes` whose length is a multiple of `multiple`."""
        found: list[int] = []
        for name in hashes:
            block_id = self._block_ids.get(name)
            if block_id is None:
                break
            found.append(block_id)
        del found[len(found) - len(found) % multiple :]
        return found

    def add(self, name: BlockHash, block_id: int) -> bool:
        """Enter a block. False, with nothing changed, when another one has that name already.

        Raises IntegrityError when the block has a name.
        """
        if block_id in self._hashes:
            raise IntegrityError(f"block {block_id} is in the prefix index already")
        if name in self._block_ids:
            return False
        self._block_ids[name] = block_id
        self._hashes[block_id] = name
        return True

    def discard(self, block_id: int) -> None:
        """Forget a block, if it is known."""
        name = self._hashes.pop(block_id, None)
        if name is not None:
            del self._block_ids[name]

    def clear(self) -> int:
        """Forget all blocks; returns how many there were."""
        count = len(self._block_ids)
        self._block_ids.clear()
        self._hashes.clear()
        return count

    def check_integrity(self) -> None:
        """Raise IntegrityError unless names and blocks are one to one."""
        if {block_id: name for name, block_id in self._block_ids.items()} != self._hashes:
            raise IntegrityError("the prefix index names blocks that do not name it")
