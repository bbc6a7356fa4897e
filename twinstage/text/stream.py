r"""The text of one continuation, from the tokens that workers produce.

    tokens -> IncrementalDetokenizer -> StopMatcher -> deltas
         \-> RepetitionDetector, if that is asked for

Joining the text of all deltas gives the text of a unary call, which is made the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinstage.text.detokenize import IncrementalDetokenizer
from twinstage.text.repetition import RepetitionDetector
from twinstage.text.stop import StopMatcher, StopResult
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import Finish, FinishReason, ProducedToken, TextOptions, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of a continuation, the tokens that belong to it, and its end.

    Tokens come with the chunk that brought them, even where their text is held back. `finish` is set once, at the end.
    """

    text: str = ""
    tokens: tuple[ProducedToken, ...] = ()
    finish: Finish | None = None


class TextStream:
    """Turns the chunks of one continuation into deltas.

    Stop strings are matched in the text that follows the first `min_tokens` tokens, and repetitions end nothing before.
    The text of a stop token that ended the generation is left out unless `include_stop_str_in_output` is set, like that
    of a stop string. Of two reasons to end with the same token, a stop string counts first, then what the worker says.
    """

    def __init__(self, tokenizer: TextTokenizer, options: TextOptions, min_tokens: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            kept=tokenizer.special_ids_of(options.kept_special_tokens),
        )
        self._matcher = StopMatcher(options.stop, include_in_output=options.include_stop_str_in_output)
        self._repetition = RepetitionDetector(options.repetition) if options.repetition is not None else None
        self._include_stop_token = options.include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._is_finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the continuation so far."""
        return self._num_tokens

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def push(self, chunk: TokenChunk) -> TextDelta:
        """Take new tokens. Those after the end are dropped: after a stop string, a repetition, or the last chunk."""
        if self._is_finished:
            return TextDelta()
        pieces: list[str] = []
        for position, token in enumerate(chunk.tokens, start=1):
            result = self._push_token(token, chunk.finish if position == len(chunk.tokens) else None)
            pieces.append(result.text)
            if result.matched is not None:
                return self._stopped(pieces, chunk.tokens[:position], result.matched)
            if self._repeats(token) and (chunk.finish is None or position < len(chunk.tokens)):
                return self._ended(pieces, chunk.tokens[:position], Finish(reason=FinishReason.REPETITION))
        if chunk.finish is None:
            return TextDelta(text="".join(pieces), tokens=chunk.tokens)
        return self._ended(pieces, chunk.tokens, chunk.finish)

    def close(self, finish: Finish) -> TextDelta:
        """End the continuation from outside (time limit, abort); return what was held back."""
        if self._is_finished:
            return TextDelta()
        return self._ended([], (), finish)

    def _push_token(self, token: ProducedToken, finish: Finish | None) -> StopResult:
        self._num_tokens += 1
        is_stop_token = finish is not None and finish.matched_token_id == token.token_id
        if is_stop_token and not self._include_stop_token:
            return StopResult("")
        text = self._detokenizer.push(token.token_id)
        if self._num_tokens <= self._min_tokens:
            return StopResult(text)
        return self._matcher.push(text)

    def _repeats(self, token: ProducedToken) -> bool:
        if self._repetition is None:
            return False
        return self._repetition.push(token.token_id) and self._num_tokens >= self._min_tokens

    def _stopped(self, pieces: list[str], tokens: tuple[ProducedToken, ...], matched: str) -> TextDelta:
        self._is_finished = True
        finish = Finish(reason=FinishReason.STOP, matched_text=matched)
        return TextDelta(text="".join(pieces), tokens=tokens, finish=finish)

    def _ended(self, pieces: list[str], tokens: tuple[ProducedToken, ...], finish: Finish) -> TextDelta:
        """Let out what was held back, which may still complete a stop string."""
        rest = self._detokenizer.flush()
        result = self._matcher.push(rest) if self._num_tokens > self._min_tokens else StopResult(rest)
        pieces.append(result.text)
        if result.matched is not None:
            return self._stopped(pieces, tokens, result.matched)
        pieces.append(self._matcher.flush())
        self._is_finished = True
        return TextDelta(text="".join(pieces), tokens=tokens, finish=finish)
