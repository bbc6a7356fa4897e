"""Placement: which prefill worker and which decode worker serve a request.

A pure function of a snapshot. It chooses the prefill worker with the fewest prompt tokens to compute until the request
has its first token: those that wait, and those of the request that it has not cached. And the decode worker with room
for what it lacks of the prompt and the fewest sequences, where one that has most of it may have one more. Equals take
turns. Workers that failed this request fatally are excluded, those that failed it otherwise are taken only when there
is no other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from twinstage.types import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One life of a worker: a restarted worker has another epoch and is another worker."""

    worker_id: WorkerId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that is ready, with its load: as reported, plus what the router has placed on it since."""

    key: WorkerKey
    running: int = 0  # sequences, those included that wait for a place in the batch
    max_sequences: int = 1  # that it computes at once
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 1

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request needs: KV room for `num_tokens` on a decode worker, unless it ends with its first token.

    Its choices share all of that but their last block. `held_tokens`: how many of its leading tokens a worker probably
    has in its prefix cache.
    """

    num_tokens: int
    num_choices: int = 1
    needs_decode: bool = True
    held_tokens: Mapping[WorkerKey, int] = field(default_factory=dict)

    def blocks_on(self, candidate: Candidate) -> int:
        """Blocks that it takes there."""
        return candidate.blocks_for(self.num_tokens) + self.num_choices - 1

    def held_by(self, candidate: Candidate) -> int:
        return self.held_tokens.get(candidate.key, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The workers of one model that are ready at this moment."""

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where a request goes; `decode` is None when it ends on the prefill worker."""

    prefill: WorkerKey
    decode: WorkerKey | None


class Refusal(enum.Enum):
    """Why a request cannot be placed."""

    NO_PREFILL_WORKER = "no prefill worker is ready"
    NO_DECODE_WORKER = "no decode worker is ready"
    TOO_LARGE = "no decode worker has enough KV blocks for this prompt"
    TOO_MANY_CHOICES = "no decode worker computes so many sequences at once as the request has choices"


NEVER_FITS = (Refusal.TOO_LARGE, Refusal.TOO_MANY_CHOICES)


def place(
    demand: Demand,
    snapshot: Snapshot,
    *,
    excluded: frozenset[WorkerKey] = frozenset(),
    avoided: frozenset[WorkerKey] = frozenset(),
    turn: int = 0,
) -> Pair | Refusal:
    """Choose workers. `turn` counts placements; it decides between workers that are equally good."""
    prefill = [candidate for candidate in snapshot.prefill if candidate.key not in excluded]
    if not prefill:
        return Refusal.NO_PREFILL_WORKER

    def prefill_cost(candidate: Candidate) -> tuple[int, ...]:
        return (candidate.key in avoided, candidate.waiting_tokens - demand.held_by(candidate), candidate.running)

    chosen_prefill = _cheapest(prefill, prefill_cost, turn)
    if not demand.needs_decode:
        return Pair(prefill=chosen_prefill.key, decode=None)

    decode = [candidate for candidate in snapshot.decode if candidate.key not in excluded]
    if not decode:
        return Refusal.NO_DECODE_WORKER
    decode = [candidate for candidate in decode if demand.blocks_on(candidate) <= candidate.total_blocks]
    if not decode:
        return Refusal.TOO_LARGE
    if demand.num_choices > 1:
        decode = [candidate for candidate in decode if demand.num_choices <= candidate.max_sequences]
        if not decode:
            return Refusal.TOO_MANY_CHOICES

    def decode_cost(candidate: Candidate) -> tuple[int, ...]:
        held = demand.held_by(candidate)
        # What others hold of the prompt is shared and takes no more room. What nobody holds counts as free and does
        # take some; the router cannot tell them apart, and at worst the request waits there for blocks.
        needed = demand.blocks_on(candidate) - held // candidate.block_size
        lacks_room = candidate.free_blocks < needed
        holds_most = 2 * held >= demand.num_tokens
        return (
            candidate.key in avoided,
            lacks_room,
            candidate.running - holds_most,
            -held,
            -candidate.free_blocks,
        )

    return Pair(prefill=chosen_prefill.key, decode=_cheapest(decode, decode_cost, turn).key)


def _cheapest(candidates: Sequence[Candidate], cost: Callable[[Candidate], tuple[int, ...]], turn: int) -> Candidate:
    """The candidate of least cost; of equals, the next one in turn."""
    least = min(map(cost, candidates))
    equals = [candidate for candidate in candidates if cost(candidate) == least]
    return equals[turn % len(equals)]
