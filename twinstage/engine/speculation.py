"""Speculative decoding: what probably comes next is guessed, and the model checks several guesses in one step.

    plan    decoding chunks get guesses ("drafts") behind their last known token, as many as seem worth their cost
    learn   how many of them were right

A model reads all its weights for one row as for a few, so a checked guess costs a fraction of a step, and each right
one saves a whole step. Only guesses that equal what the sampler draws are kept (`step_model.py`): the answer is the
same with and without. Guessing is given up where it does not pay: in large batches, for a sequence whose guesses are
mostly wrong, without blocks to spare. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from twinstage.engine.plan import ScheduledChunk
from twinstage.engine.sequence import Sequence
from twinstage.errors import ConfigError, KvExhausted
from twinstage.kv.layout import blocks_for
from twinstage.telemetry.log import get_logger

# What a step takes, in units of what it would take without rows: own kernels compute rows by fours, and attention costs
# a little for each. Fitted to steps of 1 to 32 rows of a model of 135 million weights; a larger one gains more.
_TILE, _TILE_ROW_COST, _ROW_COST = 4, 0.25, 0.05
_MEMORY = 0.8  # by which what was learnt of a sequence counts less with each guess that was checked
_PRIOR_CHECKED, _PRIOR_RIGHT = 3.0, 2.0  # a new sequence is taken for a good one
_PAUSE_STEPS = 32  # between trials of a sequence for which guessing does not pay

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How to guess. Raises ConfigError for what cannot be.

    `num_tokens` are guessed at most for one step; none when more than `max_sequences` are decoded in it. `ngram`: what
    followed the last time that the sequence's last tokens, `ngram_max` to `ngram_min` of them, occurred in it.
    `draft_model`: what that model (with a Hub id, of `draft_revision`), which must have the same tokens, draws; its
    weights and KV memory come on top. A guess of it takes `draft_cost` steps of the model that checks,
    which is by default the ratio of their weights.
    """

    method: Literal["ngram", "draft_model"]
    num_tokens: int = 7
    max_sequences: int = 8
    ngram_max: int = 4
    ngram_min: int = 2
    draft_model: str = ""
    draft_revision: str | None = None
    draft_weights: str = "auto"
    draft_kv_cache_bytes: int = 256 * 1024 * 1024
    draft_cost: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_sequences", "ngram_min", "draft_kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ngram_max < self.ngram_min:
            raise ConfigError(f"ngram_max, {self.ngram_max}, must not be below ngram_min, {self.ngram_min}")
        if self.method == "draft_model" and not self.draft_model:
            raise ConfigError("the method draft_model needs a draft_model: a directory, a Hub id or a .gguf file")


class Drafter(Protocol):
    """Guesses what comes next. `cost` of a guess, in steps of the model that checks it."""

    cost: float

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence at most so many tokens that may follow its last known one, in order."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        ...


@dataclass(slots=True)
class _Record:
    """What was learnt of a sequence: guesses that were checked until one was wrong, and those that were right."""

    checked: float = _PRIOR_CHECKED
    right: float = _PRIOR_RIGHT
    pause: int = 0  # steps until the next trial

    def learn(self, proposed: int, accepted: int) -> None:
        checked = min(proposed, accepted + 1)
        fading = _MEMORY**checked
        self.checked = self.checked * fading + checked
        self.right = self.right * fading + accepted

    def worthwhile(self, most: int, *, batch: int, draft_cost: float) -> int:
        """How many guesses for each of `batch` sequences give the most tokens for the time; 0 when none pays."""
        rate = self.right / self.checked
        alone = _step_cost(batch)
        best, best_gain, tokens = 0, 1.0, 1.0
        for count in range(1, most + 1):
            tokens += rate**count  # expected from a step with so many guesses
            gain = tokens / (_step_cost(batch * (1 + count)) / alone + draft_cost * count)
            if gain > best_gain:
                best, best_gain = count, gain
        return best


def _step_cost(rows: int) -> float:
    return 1.0 + _TILE_ROW_COST * _TILE * -(-rows // _TILE) + _ROW_COST * rows


class NoSpeculation:
    """In the place of `Speculation`: nothing is guessed."""

    def plan(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks as they are."""
        return chunks

    def learn(self, chunk: ScheduledChunk, *, accepted: int) -> None:
        """Nothing was guessed."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is known."""


class Speculation:
    """The guesses of one engine. For its thread."""

    def __init__(self, drafter: Drafter, options: SpeculationOptions, *, block_size: int, max_model_len: int) -> None:
        self._drafter: Drafter | None = drafter
        self._options = options
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._records: dict[Sequence, _Record] = {}

    def plan(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """The decoding chunks of a step, with guesses where they are likely to save time."""
        if self._drafter is None or not 0 < len(chunks) <= self._options.max_sequences:
            return chunks
        wanted = [(chunk.sequence, self._count(chunk.sequence, batch=len(chunks))) for chunk in chunks]
        asked = [(sequence, count) for sequence, count in wanted if count]
        if not asked:
            return chunks
        try:
            proposals = iter(self._drafter.propose(asked))
        # Guesses are an aid: whatever goes wrong with them ends them, and no request.
        except Exception:
            logger.exception("guessing ahead failed, and is given up")
            self._drafter = None
            return chunks
        return [
            self._with_drafts(chunk, next(proposals), others=len(chunks)) if count else chunk
            for chunk, (_, count) in zip(chunks, wanted, strict=True)
        ]

    def learn(self, chunk: ScheduledChunk, *, accepted: int) -> None:
        """`accepted` of the chunk's guesses were right."""
        if chunk.draft_token_ids and (record := self._records.get(chunk.sequence)) is not None:
            record.learn(len(chunk.draft_token_ids), accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._records.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def _count(self, sequence: Sequence, *, batch: int) -> int:
        """How many tokens to guess: what seems worth it, and what can still be generated beside the next one."""
        left = sequence.spec.max_tokens - len(sequence.output_token_ids) - 1
        room = min(self._options.num_tokens, left, self._max_model_len - sequence.num_tokens - 1)
        if room < 1 or self._drafter is None:
            return 0
        record = self._records.setdefault(sequence, _Record())
        if record.pause:
            record.pause -= 1
            return 0
        count = record.worthwhile(room, batch=batch, draft_cost=self._drafter.cost)
        if not count:
            record.pause = _PAUSE_STEPS
            return 1  # times change: one guess now and then
        return count

    def _with_drafts(self, chunk: ScheduledChunk, drafts: list[int], *, others: int) -> ScheduledChunk:
        """`chunk` with those of `drafts` for which it has blocks, or gets some that nobody will miss."""
        table = chunk.sequence.table
        missing = blocks_for(chunk.end + len(drafts), block_size=self._block_size) - len(table)
        if missing > 0:
            try:
                table.grow(missing, keep_free=others)
            except KvExhausted:
                drafts = drafts[: len(table) * self._block_size - chunk.end]
        if not drafts:
            return chunk
        return replace(chunk, length=chunk.length + len(drafts), draft_token_ids=tuple(drafts))
