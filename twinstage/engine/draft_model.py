"""Guesses by a second, smaller model, which has KV memory of its own.

Every sequence has a shadow here: the same tokens, and behind them guesses, as far as the draft model has computed them.
Before it guesses it computes what it does not know of the sequence yet: at first the whole prompt, in parts, so that
nobody waits long for it. It draws with the same random numbers as the model that checks: where both find the same
tokens likely, they mostly draw the same one, whatever the temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.sampler import Sampler
from twinstage.engine.sequence import Sequence
from twinstage.engine.step_model import Runner
from twinstage.errors import KvExhausted
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.layout import blocks_for
from twinstage.types import ProducedToken

CATCH_UP_PER_STEP = 128  # known tokens that are computed before guessing, of all sequences


class ModelDrafter:
    """Draws guesses from a model with its own block pool. For one thread."""

    def __init__(
        self, runner: Runner, pool: BlockPool, *, block_size: int, num_tokens: int, max_model_len: int, cost: float
    ) -> None:
        """Both models know the token ids below `num_tokens`; `max_model_len` is the draft model's."""
        self.cost = cost
        self._runner = runner
        self._pool = pool
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._max_model_len = max_model_len
        self._sampler = Sampler()
        self._shadows: dict[Sequence, _Shadow] = {}

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """As the protocol says."""
        shadows = [self._shadow_of(sequence) for sequence, _ in wanted]
        asked = [
            (shadow, count)
            for shadow, (_, count) in zip(shadows, wanted, strict=True)
            if shadow is not None and self._make_room(shadow, count, spared=shadows)
        ]
        self._guess(asked)
        return [shadow.drafts if shadow is not None else [] for shadow in shadows]

    def forget(self, sequence: Sequence) -> None:
        """As the protocol says."""
        if (shadow := self._shadows.pop(sequence, None)) is not None:
            shadow.state.table.release()

    def _shadow_of(self, sequence: Sequence) -> _Shadow | None:
        """The shadow with the tokens that the sequence has now; None when the draft model does not know one of them."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            if max(sequence.spec.prompt_token_ids) >= self._num_tokens:
                return None
            spec = replace(sequence.spec, logprobs=None, prompt_logprobs=None)
            table = self._pool.allocate(0, owner=sequence.request_id)
            state = Sequence(spec=spec, table=table, arrival=sequence.arrival, arrived_s=sequence.arrived_s)
            shadow = self._shadows[sequence] = _Shadow(state)
        shadow.follow(sequence)
        if max(sequence.output_token_ids[shadow.num_old :], default=0) >= self._num_tokens:
            self.forget(sequence)
            return None
        return shadow

    def _make_room(self, shadow: _Shadow, count: int, *, spared: list[_Shadow | None]) -> bool:
        """Blocks for all known tokens and guesses, if need be at the cost of shadows that are not asked for now."""
        state = shadow.state
        if state.num_tokens + count > self._max_model_len:
            return False
        missing = blocks_for(state.num_tokens + count, block_size=self._block_size) - len(state.table)
        if missing <= 0:
            return True
        for sequence in [None, *(other for other, held in self._shadows.items() if held not in spared)]:
            if sequence is not None:
                self.forget(sequence)
            try:
                state.table.grow(missing)
            except KvExhausted:
                continue
            return True
        return False

    def _guess(self, asked: list[tuple[_Shadow, int]]) -> None:
        """Let every shadow have its guesses; one that has much to compute before gets none this time."""
        left = CATCH_UP_PER_STEP
        chunks: list[tuple[_Shadow, ScheduledChunk]] = []
        for shadow, _ in asked:
            length = min(left, shadow.state.num_uncomputed_tokens)
            left -= length
            if length:
                chunks.append((shadow, shadow.chunk(length)))
        counts = {id(shadow): count for shadow, count in asked}
        while chunks:
            able = self._compute(chunks)
            chunks = [(shadow, shadow.chunk(1)) for shadow in able if len(shadow.drafts) < counts[id(shadow)]]

    def _compute(self, chunks: list[tuple[_Shadow, ScheduledChunk]]) -> list[_Shadow]:
        """Compute, and draw a token for each that computed its last one; returns those that may go on."""
        logits = self._runner.run(StepPlan(chunks=tuple(chunk for _, chunk in chunks)))
        for shadow, chunk in chunks:
            shadow.state.num_computed_tokens = chunk.end
        drawing = [shadow for shadow, chunk in chunks if chunk.samples]
        tokens = self._sampler.sample(logits, [shadow.state for shadow in drawing])
        able = []
        for shadow, token in zip(drawing, tokens, strict=True):
            if isinstance(token, ProducedToken) and token.token_id < self._num_tokens:
                shadow.draft(token.token_id)
                able.append(shadow)
        return able


@dataclass(slots=True, eq=False)
class _Shadow:
    """What the draft model has of a sequence. `num_old` output tokens of it were there before the last `follow`."""

    state: Sequence  # its output tokens are the sequence's, and then `drafts`
    drafts: list[int] = field(default_factory=list)
    num_old: int = 0

    def follow(self, sequence: Sequence) -> None:
        """Take the tokens that the sequence has now. What was computed of right guesses stays computed."""
        ours, theirs = self.state.output_token_ids, sequence.output_token_ids
        equal = self.num_old = len(ours) - len(self.drafts)
        while equal < min(len(ours), len(theirs)) and ours[equal] == theirs[equal]:
            equal += 1
        ours[equal:] = theirs[equal:]
        self.drafts = []
        num_equal = len(sequence.spec.prompt_token_ids) + equal
        self.state.num_computed_tokens = min(self.state.num_computed_tokens, num_equal)

    def draft(self, token_id: int) -> None:
        """A guess behind all that is known."""
        self.drafts.append(token_id)
        self.state.output_token_ids.append(token_id)

    def chunk(self, length: int) -> ScheduledChunk:
        """The next `length` tokens to compute."""
        start = self.state.num_computed_tokens
        samples = start + length == self.state.num_tokens
        return ScheduledChunk(sequence=self.state, start=start, length=length, samples=samples)
