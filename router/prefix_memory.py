"""Which workers have lately had which beginnings: what placement knows of their prefix caches.

The router does not ask workers what they keep: it remembers what it sent where, by the same chained hashes of token ids
as theirs, in steps of `STEP_TOKENS`. It may be wrong, when a worker has evicted something since; that costs a better
place, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from router.placement import WorkerKey
from twinstage.kv.prefix_index import BlockHash, HashChain, PrefixHasher

STEP_TOKENS = 64
MAX_STEPS = 16_384  # a million tokens, some 5 MB
MAX_HOLDERS = 8  # of one beginning: those that had it last


class PrefixMemory:
    """Beginnings and who had them; the least recently used are forgotten. Belongs to one event loop."""

    def __init__(self, *, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._holders: OrderedDict[BlockHash, tuple[WorkerKey, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def clear(self) -> None:
        """The workers were told to forget."""
        self._holders.clear()

    def held_tokens(self, hashes: Iterable[BlockHash]) -> dict[WorkerKey, int]:
        """How many leading tokens each worker probably has of a sequence; workers that have none are left out."""
        steps: dict[WorkerKey, int] = {}
        for position, name in enumerate(hashes):
            holders = self._holders.get(name)
            if holders is None:
                break
            for worker in holders:
                if steps.get(worker, 0) == position:
                    steps[worker] = position + 1
        return {worker: count * STEP_TOKENS for worker, count in steps.items()}

    def remember(self, hashes: Iterable[BlockHash], *workers: WorkerKey) -> None:
        """These workers have that sequence now."""
        for name in hashes:
            before = self._holders.pop(name, ())
            others = tuple(worker for worker in before if worker not in workers)
            self._holders[name] = (*workers, *others)[:MAX_HOLDERS]
        while len(self._holders) > self._max_steps:
            self._holders.popitem(last=False)


class PrefixTrail:
    """One sequence, as far as it is known, in the memory."""

    def __init__(self, memory: PrefixMemory, *, model_fingerprint: str, salt: str) -> None:
        self._memory = memory
        self._chain: HashChain = PrefixHasher(model_fingerprint, block_size=STEP_TOKENS).chain(salt=salt)

    def held_tokens(self, token_ids: Sequence[int]) -> Mapping[WorkerKey, int]:
        """How much of the beginning of `token_ids` (the whole sequence so far) each worker probably has."""
        self._extend(token_ids)
        return self._memory.held_tokens(self._chain.hashes)

    def went_to(self, token_ids: Sequence[int], *workers: WorkerKey | None) -> None:
        """These workers have the whole sequence, or soon will."""
        self._extend(token_ids)
        self._memory.remember(self._chain.hashes, *(worker for worker in workers if worker is not None))

    def _extend(self, token_ids: Sequence[int]) -> None:
        self._chain.extend(token_ids[self._chain.num_tokens :])
