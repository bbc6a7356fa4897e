"""One of the continuations that a request asks for: what it has so far, and how it goes to the client."""

from __future__ import annotations

from collections.abc import Sequence

from router.outbox import DeltaEvent, FinishEvent, Outbox, PromptEvent, PromptLogprobsEvent
from twinstage.text.stream import TextDelta, TextStream
from twinstage.types import Finish, PromptLogprobs, TokenChunk


class Choice:
    """One continuation. It outlives the attempts that produce its tokens."""

    __slots__ = ("finish", "index", "text", "token_ids")

    def __init__(self, index: int, text: TextStream) -> None:
        self.index = index  # among the choices of the prompt, and part of the random numbers' key
        self.text = text
        self.token_ids: list[int] = []  # all that workers have produced, in order
        self.finish: Finish | None = None

    def take(self, chunk: TokenChunk) -> TextDelta:
        """Turn new tokens into text. What comes after the end, as workers hear of that a little later, is dropped."""
        if self.finish is not None:
            return TextDelta()
        self.token_ids += [token.token_id for token in chunk.tokens]
        delta = self.text.push(chunk)
        self.finish = delta.finish
        return delta

    def close(self, finish: Finish) -> TextDelta:
        """End it from outside (time limit, operator); what was held back comes out."""
        delta = self.text.close(finish)
        self.finish = delta.finish
        return delta


class Delivery:
    """The choices of one prompt on their way into the outbox. `first_index` is the index of the first one there."""

    def __init__(self, outbox: Outbox, opening: PromptEvent, *, first_index: int, prompt_index: int) -> None:
        """`opening` comes before the first delta, and once in a call however many prompts that has."""
        self.has_scores = False  # log probabilities of the prompt were sent
        self._prompt_index = prompt_index
        self._outbox = outbox
        self._opening = opening
        self._first_index = first_index

    def send_scores(self, parts: Sequence[PromptLogprobs]) -> None:
        """Put the log probabilities of the prompt, which come before any delta of it."""
        for part in parts:
            self.has_scores = True
            self._outbox.open(self._opening)
            self._outbox.put(PromptLogprobsEvent(prompt_index=self._prompt_index, logprobs=part))

    def send(self, choice: Choice, delta: TextDelta) -> None:
        """Put new text and tokens, and the end of the choice if it came with them."""
        # Not before the first token: a stream that has begun can no longer be retried by the client's gRPC.
        self._outbox.open(self._opening)
        index = self._first_index + choice.index
        if delta.text or delta.tokens:
            self._outbox.put(DeltaEvent(index=index, text=delta.text, tokens=delta.tokens))
        if delta.finish is not None:
            self._outbox.put(FinishEvent(index=index, finish=delta.finish))
