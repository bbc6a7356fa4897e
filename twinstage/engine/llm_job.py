"""One continuation of a prompt on its way through the engine of one process, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinstage.engine.sequence import SequenceStats
from twinstage.errors import InternalError
from twinstage.text.stream import TextDelta, TextStream
from twinstage.types import Finish, ProducedToken, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One continuation of a prompt. `tokens` carries the logprobs when they were asked for.

    `prompt_logprobs` are those of the prompt's own tokens from the second one on, where they were asked for; all
    continuations of a prompt have the same.
    """

    prompt_token_ids: tuple[int, ...]
    tokens: tuple[ProducedToken, ...]
    text: str
    finish: Finish
    prompt_logprobs: tuple[ProducedToken, ...] = ()
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


class Job:
    """One continuation of a prompt on its way through the engine."""

    def __init__(self, spec: SequenceSpec, stream: TextStream) -> None:
        self.spec = spec
        self.stream = stream
        self.finish: Finish | None = None
        self.scores: list[ProducedToken] = []  # of the prompt; only the first continuation gets them
        self.stats: SequenceStats | None = None
        self._tokens: list[ProducedToken] = []
        self._text: list[str] = []

    def take(self, delta: TextDelta) -> None:
        self._tokens.extend(delta.tokens)
        self._text.append(delta.text)
        self.finish = self.finish or delta.finish

    def result(self, *, scores: Sequence[ProducedToken] = ()) -> GenerationResult:
        """What became of it. `scores` are of its prompt. Raises InternalError when it has not ended."""
        if self.finish is None:
            raise InternalError(f"{self.spec.request_id} did not end")
        return GenerationResult(
            prompt_token_ids=self.spec.prompt_token_ids,
            tokens=tuple(self._tokens),
            text="".join(self._text),
            finish=self.finish,
            prompt_logprobs=tuple(scores),
            proposed_draft_tokens=self.stats.proposed_draft_tokens if self.stats is not None else 0,
            accepted_draft_tokens=self.stats.accepted_draft_tokens if self.stats is not None else 0,
        )
