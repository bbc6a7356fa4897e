"""The boundary to the model: a plan goes in, and logits come out, from which tokens and log probabilities are taken.

    run ──rows of logits, by chunk──> score   log probabilities of prompt tokens
                                 └──> draw    the next token; after guessed ones, as many as were guessed right, and one

A guess is right when it is the token that the sampler draws in its place: a token is a pure function of logits, request
and position, so what comes out is what would have come out without guessing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twinstage.engine.choices import choices_of
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.sampler import Logits, Row, Sampled, Sampler
from twinstage.engine.scoring import score_tokens
from twinstage.engine.sequence import Sequence
from twinstage.errors import ComputeFailed, InvalidRequest, TwinstageError, Unavailable
from twinstage.telemetry.log import get_logger
from twinstage.types import Finish, ProducedToken, PromptLogprobs

logger = get_logger(__name__)


class Runner(Protocol):
    """Computes a plan: writes keys and values of every chunk.

    Returns float32 logits `[plan.num_logits, vocab]`: of each chunk its last `num_logits` rows, in the order of the
    chunks. They are read before the next call and may be memory that the runner uses again.
    """

    def run(self, plan: StepPlan) -> NDArray[np.float32]: ...


@dataclass(slots=True)
class Drawn:
    """What became of a chunk: its new tokens, which the sequence has already, and how or why it ends with them."""

    tokens: list[ProducedToken] = field(default_factory=list)
    finish: Finish | None = None
    error: Unavailable | InvalidRequest | None = None
    num_accepted: int = 0  # guesses that were right


class StepModel:
    """A runner and the sampler after it. For one thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._sampler = Sampler()

    def run(self, plan: StepPlan) -> list[Logits]:
        """The logits of each chunk, `[chunk.num_logits, vocab]`; valid until the next call.

        Raises TwinstageError, whatever the model raises: the keys and values of the plan are then not to be trusted.
        """
        try:
            logits = self._runner.run(plan)
        # The boundary to the model: whatever it raises ends the sequences of this plan, never the engine.
        except Exception as error:
            logger.exception("step failed", sequences=len(plan.chunks), tokens=plan.num_tokens)
            if isinstance(error, TwinstageError):
                raise
            raise ComputeFailed(f"the model failed: {error!r:.200}") from error
        if len(logits) != plan.num_logits:
            raise ComputeFailed(f"the runner returned {len(logits)} rows of logits, not {plan.num_logits}")
        ends = np.cumsum([chunk.num_logits for chunk in plan.chunks]).tolist()
        return [logits[end - chunk.num_logits : end] for chunk, end in zip(plan.chunks, ends, strict=True)]

    def score(self, chunk: ScheduledChunk, logits: Logits) -> PromptLogprobs | None:
        """Log probabilities of the prompt tokens that the rows of a chunk predict; None when all were given before.

        Raises ComputeFailed where the logits are not numbers.
        """
        sequence = chunk.sequence
        first = max(chunk.start + 1, sequence.num_scored_tokens)
        end = min(chunk.end + 1, len(sequence.spec.prompt_token_ids))
        if first >= end:
            return None
        rows = logits[first - 1 - chunk.start : end - 1 - chunk.start]
        scores = score_tokens(rows, sequence, first=first)
        sequence.num_scored_tokens = end
        return scores

    def draw(self, chunk: ScheduledChunk, logits: Logits, *, max_model_len: int) -> Drawn:
        """The tokens after the last known one of a chunk that samples, appended to its sequence."""
        sequence, drawn = chunk.sequence, Drawn()
        sequence.num_proposed_tokens += len(chunk.draft_token_ids)
        expected: tuple[int | None, ...] = (*chunk.draft_token_ids, None)
        for row, guess in zip(logits[-len(expected) :], expected, strict=True):
            token = self._draw_one(row, sequence)
            if not isinstance(token, ProducedToken):
                drawn.error = token
                break
            sequence.output_token_ids.append(token.token_id)
            sequence.follow(token.token_id)
            drawn.tokens.append(token)
            drawn.finish = sequence.finish_after(token.token_id, max_model_len=max_model_len)
            if token.token_id != guess:
                break
            drawn.num_accepted += 1
            if drawn.finish is not None:
                break
            sequence.mark_computed(sequence.num_computed_tokens + 1)  # the guess was computed as what it is
        sequence.num_accepted_tokens += drawn.num_accepted
        return drawn

    def draw_choices(self, sequence: Sequence, row: Row) -> list[ProducedToken]:
        """A token for each choice of a prompt, all from the same logits. Raises why there is none."""
        tokens = []
        for choice in choices_of(sequence):
            token = self._draw_one(row, choice)
            if not isinstance(token, ProducedToken):
                raise token
            tokens.append(token)
        return tokens

    def _draw_one(self, row: Row, sequence: Sequence) -> Sampled:
        try:
            return self._sampler.sample(row[None], [sequence])[0]
        # What goes wrong with one request's numbers ends that request alone.
        except Exception as error:
            logger.exception("sampling failed", request_id=sequence.request_id)
            return ComputeFailed(f"a token could not be drawn: {error!r:.200}")
