"""From planned segments to prompts with an exact number of tokens: as token ids, or as text."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from twinstage.bench.plan import Segment
from twinstage.errors import ConfigError

CountTokens = Callable[[str], Awaitable[int]]

# Common words, which most tokenizers have as one token with the space before them, and letters for those that do not.
_WORDS = tuple(
    re.findall(
        " [a-z]+",
        " the of and to in is that for it was on are as with his they at be this from have or by one had not but what "
        " all were when we there can an your which their said if do will each about how up out them then she many some "
        " so these would other into has more her two like him see time could no make than first been its who now",
    )
)
_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def content(key: str, count: int, *, low: int, high: int, seed: int) -> list[int]:
    """`count` numbers in [low, high), random, and the same whenever key and seed are the same."""
    drawn = array("I", random.Random(f"{seed}/{key}").randbytes(array("I").itemsize * count))
    span = high - low
    return [low + value % span for value in drawn]


def usable_ids(vocabulary_size: int) -> tuple[int, int]:
    """The ids [low, high) to draw from: the middle of the vocabulary, as special and unused ids sit at its ends."""
    return vocabulary_size // 8, max(vocabulary_size // 8 + 1, vocabulary_size * 3 // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdPrompts:
    """Makes prompts of token ids for a vocabulary."""

    vocabulary_size: int
    seed: int

    def make(self, segments: Sequence[Segment]) -> list[int]:
        low, high = usable_ids(self.vocabulary_size)
        token_ids: list[int] = []
        for segment in segments:
            token_ids += content(segment.key, segment.tokens, low=low, high=high, seed=self.seed)
        return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompts:
    """Makes texts of pieces that are one token each; `overhead` tokens come on top of every text (such as BOS)."""

    pieces: tuple[str, ...]
    overhead: int
    seed: int

    def make(self, segments: Sequence[Segment]) -> str:
        """A prompt that is meant to be shorter than the shortest text, one piece and the overhead, is that text."""
        num_pieces = max(1, sum(segment.tokens for segment in segments) - self.overhead)
        chosen: list[str] = []
        for segment in segments:
            numbers = content(segment.key, segment.tokens, low=0, high=len(self.pieces), seed=self.seed)
            chosen += [self.pieces[number] for number in numbers]
        return "".join(chosen[:num_pieces])


async def find_text_prompts(count_tokens: CountTokens, *, seed: int) -> TextPrompts:
    """Find out, by asking, which pieces are one token each wherever they stand. Raises ConfigError if none is."""
    for candidates in (_WORDS, _LETTERS):
        singles = [piece for piece in candidates if await _overhead((piece,), count_tokens) is not None]
        for pieces in (tuple(singles), tuple(singles[:1])):
            overhead = await _overhead(pieces, count_tokens) if pieces else None
            if overhead is not None:
                return TextPrompts(pieces=pieces, overhead=overhead, seed=seed)
    raise ConfigError(
        "no text with an exact number of tokens can be made for this tokenizer; send token ids instead "
        "(--prompt-form ids, with --vocabulary-size where the server does not say it)"
    )


async def _overhead(pieces: Sequence[str], count_tokens: CountTokens) -> int | None:
    """The tokens of a text besides one for each piece; None when they are not one token each, however often."""
    text = "".join(pieces)
    counts = [await count_tokens(text * number) for number in (1, 2, 3)]
    overhead = counts[0] - len(pieces)
    fits = all(count == overhead + number * len(pieces) for number, count in enumerate(counts, start=1))
    return overhead if fits and overhead >= 0 else None
