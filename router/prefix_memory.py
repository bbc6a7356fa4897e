"""Which workers have lately had which beginnings: what placement knows of their prefix caches.

The router does not ask workers what they keep: it remembers what it saw them get, by the same chained hashes of token
ids as theirs, in steps of `STEP_TOKENS`. What a worker is about to get is marked for as long as that lasts, so that
equal prompts which arrive together meet. The memory may be wrong, when a worker has evicted something since; that costs
a better place, nothing else.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        self._expected: dict[BlockHash, Counter[WorkerKey]] = {}  # bounded by what is in progress
        self.times_cleared = 0

    def __len__(self) -> int:
        return len(self._holders)

    def clear(self) -> None:
        """The workers were told to forget, and will not keep what is in progress."""
        self._holders.clear()
        self._expected.clear()
        self.times_cleared += 1

    def held_tokens(self, hashes: Iterable[BlockHash]) -> dict[WorkerKey, int]:
        """How many leading tokens of a sequence each worker probably has, or soon will; who has none is left out."""
        steps: dict[WorkerKey, int] = {}
        for position, name in enumerate(hashes):
            holders = {*self._holders.get(name, ()), *self._expected.get(name, ())}
            if not holders:
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

    @contextlib.contextmanager
    def expected(self, hashes: Sequence[BlockHash], *workers: WorkerKey) -> Iterator[None]:
        """While in scope, these workers are about to have that sequence."""
        for name in hashes:
            self._expected.setdefault(name, Counter()).update(workers)
        try:
            yield
        finally:
            for name in hashes:
                self._no_longer_expected(name, workers)

    def _no_longer_expected(self, name: BlockHash, workers: Iterable[WorkerKey]) -> None:
        if (counts := self._expected.get(name)) is None:
            return  # cleared meanwhile
        counts.subtract(workers)
        left = +counts
        if left:
            self._expected[name] = left
        else:
            del self._expected[name]


class PrefixTrail:
    """One sequence, as far as it is known, in the memory."""

    def __init__(self, memory: PrefixMemory, *, model_fingerprint: str, salt: str) -> None:
        self._memory = memory
        self._times_cleared = memory.times_cleared
        self._chain: HashChain = PrefixHasher(model_fingerprint, block_size=STEP_TOKENS).chain(salt=salt)

    def held_tokens(self, token_ids: Sequence[int]) -> Mapping[WorkerKey, int]:
        """How much of the beginning of `token_ids`, each worker probably has."""
        return self._memory.held_tokens(self._hashes(token_ids))

    def expected(self, token_ids: Sequence[int], *workers: WorkerKey | None) -> contextlib.AbstractContextManager[None]:
        """While in scope, these workers are about to have `token_ids`."""
        return self._memory.expected(self._hashes(token_ids), *_present(workers))

    def went_to(self, token_ids: Sequence[int], *workers: WorkerKey | None) -> None:
        """These workers have `token_ids` now, unless they were told to forget since the sequence began."""
        if self._times_cleared == self._memory.times_cleared:
            self._memory.remember(self._hashes(token_ids), *_present(workers))

    def _hashes(self, token_ids: Sequence[int]) -> Sequence[BlockHash]:
        """The names of the whole steps of `token_ids`, which begin or continue the sequence as it is known."""
        self._chain.extend(token_ids[self._chain.num_tokens :])
        return self._chain.hashes[: len(token_ids) // STEP_TOKENS]


def _present(workers: Iterable[WorkerKey | None]) -> Iterable[WorkerKey]:
    return [worker for worker in workers if worker is not None]
