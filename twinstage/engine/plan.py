"""What one engine step computes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """The tokens `start .. start + length - 1` of a sequence, positions in `sequence.token_ids`.

    The keys and values of all earlier tokens are in `sequence.table`, which has room for these. `samples`: the chunk
    ends with the last known token, so its last logits give the next one.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The chunks of one step, at most one per sequence."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
