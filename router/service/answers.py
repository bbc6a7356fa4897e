"""The typed parts of the answers of one call: each choice is read by a parser of its own."""

from __future__ import annotations

from twinstage.text.answers.parser import AnswerParser
from twinstage.text.answers.parts import AnswerDelta
from twinstage.types import AnswerFormat, Finish


class Answers:
    """Reads text as it comes. Without a format all of it is content."""

    def __init__(self, format: AnswerFormat | None = None) -> None:
        self._format = format
        self._parsers: dict[int, AnswerParser] = {}

    def delta(self, index: int, text: str) -> AnswerDelta:
        """What new text of choice `index` adds to its answer."""
        parser = self._parser(index)
        return AnswerDelta(content=text) if parser is None else parser.push(text)

    def finish(self, index: int, finish: Finish) -> tuple[AnswerDelta, Finish]:
        """What was held back of choice `index`, and how its answer ended."""
        parser = self._parser(index)
        return (AnswerDelta(), finish) if parser is None else parser.finish(finish)

    def _parser(self, index: int) -> AnswerParser | None:
        if self._format is None:
            return None
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(self._format)
        return self._parsers[index]
