"""What one engine step computes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """The tokens `start .. start + length - 1` of a sequence, positions in `sequence.token_ids`.

    The keys and values of all earlier tokens are in `sequence.table`, which has room for these. `samples`: the chunk
    has the last known token, whose logits give the next one. `draft_token_ids` come after that one: guesses of what
    follows it, each of which is checked by the logits of the token before it. `scores`: log probabilities are wanted of
    prompt tokens that the rows of this chunk predict.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    scores: bool = False
    draft_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def known_end(self) -> int:
        """The end of the tokens that are no guesses."""
        return self.end - len(self.draft_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the chunk."""
        return [*self.sequence.token_ids_between(self.start, self.known_end), *self.draft_token_ids]

    @property
    def num_logits(self) -> int:
        """Of so many of its last tokens the logits are wanted."""
        if self.scores:
            return self.length
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The chunks of one step, at most one per sequence."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_logits(self) -> int:
        return sum(chunk.num_logits for chunk in self.chunks)
