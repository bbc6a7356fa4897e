"""Text that comes in pieces, for parsers that are written as one sequence of steps.

A step is a generator: it yields when what has come does not suffice to decide, and is resumed when more text has come
or the text has ended. So no step's result depends on the borders of the pieces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

from twinstage.text.answers.nesting import JSON, PYTHON, Nesting

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Emit = Callable[[str], None]

MAX_HEAD_CHARACTERS = 256  # of a name or key: what is longer is none, and is not looked at again and again

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_WORD = re.compile(r"[\w.]*")
_SCALAR = re.compile(r"[-+.\w]+")


class Malformed(Exception):
    """The text is not what the step reads; the reader stands where that became clear."""


class Reader:
    """What has come and was not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._passed: list[str] = []  # what was read since the mark and is not in the text any more
        self._ended = False

    def feed(self, text: str) -> None:
        """Add a piece."""
        if self._mark is not None:
            self._passed.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def mark(self, *, behind: int = 0) -> None:
        """Remember this place, or one `behind` characters before it, for `since_mark`."""
        self._passed.clear()
        self._mark = self._at - behind

    def since_mark(self) -> str:
        """What was read since the mark, which is forgotten."""
        if self._mark is not None:
            self._passed.append(self._text[self._mark : self._at])
        text = "".join(self._passed)
        self._passed.clear()
        self._mark = None
        return text

    def back(self, characters: int) -> None:
        """Unread what was read last."""
        self._at -= characters

    # --- steps ------------------------------------------------------------------------------------

    def peek(self) -> Steps[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def spaces(self) -> Steps[None]:
        """Skip whitespace."""
        while True:
            self._at = self._matched_end(_SPACE)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def literal(self, *choices: str) -> Steps[str]:
        """Take the longest of the choices that comes next; empty, and nothing taken, when none does."""
        while True:
            room = len(self._text) - self._at
            undecided = (choice for choice in choices if len(choice) > room)
            if self._ended or not any(choice.startswith(self._text[self._at :]) for choice in undecided):
                break
            yield
        found = max((choice for choice in choices if self._text.startswith(choice, self._at)), key=len, default="")
        self._at += len(found)
        return found

    def expect(self, *choices: str) -> Steps[str]:
        """Take one of the choices. Raises Malformed."""
        found = yield from self.literal(*choices)
        if not found:
            raise Malformed
        return found

    def until(self, *markers: str, emit: Emit) -> Steps[str]:
        """Take text up to the first marker and the marker, which is returned; empty when the text ends before one."""
        while True:
            hits = ((self._text.find(marker, self._at), marker) for marker in markers)
            start, marker = min(((at, marker) for at, marker in hits if at >= 0), default=(len(self._text), ""))
            # A longer marker may begin before: what has come decides only once it cannot be one.
            begun = () if self._ended else map(self._start_of_prefix, markers)
            safe = min(begun, default=len(self._text))
            certain = min(start, safe)
            if certain > self._at:
                emit(self._text[self._at : certain])
                self._at = certain
            if marker and start == certain:
                self._at = start + len(marker)
                return marker
            if self._ended:
                return ""
            yield

    def head(self, *markers: str) -> Steps[tuple[str, str]]:
        """A short text up to one of the markers, and the marker. Raises Malformed when it is long or none comes."""
        longest = max(map(len, markers))
        while True:
            hits = ((self._text.find(marker, self._at), marker) for marker in markers)
            at, marker = min(((at, marker) for at, marker in hits if at >= 0), default=(len(self._text) - longest, ""))
            if at - self._at > MAX_HEAD_CHARACTERS:
                self._at += MAX_HEAD_CHARACTERS
                raise Malformed
            if marker:
                head, self._at = self._text[self._at : at], at + len(marker)
                return head, marker
            if self._ended:
                self._at = len(self._text)
                raise Malformed
            yield

    def word(self) -> Steps[str]:
        """Take letters, digits, underscores and dots: a short name, which may be empty."""
        while True:
            end = self._matched_end(_WORD)
            if end < len(self._text) or self._ended or end - self._at > MAX_HEAD_CHARACTERS:
                break
            yield
        end = min(end, self._at + MAX_HEAD_CHARACTERS)
        word, self._at = self._text[self._at : end], end
        return word

    def short_string(self) -> Steps[str]:
        """A short JSON string, with its quotes. Raises Malformed."""
        if (yield from self.peek()) != '"':
            raise Malformed
        while True:
            match = _STRING.match(self._text, self._at)
            length = (match.end() if match else len(self._text)) - self._at
            if length > MAX_HEAD_CHARACTERS:
                self._at += MAX_HEAD_CHARACTERS
                raise Malformed
            if match:
                self._at = match.end()
                return match.group()
            if self._ended:
                self._at = len(self._text)
                raise Malformed
            yield

    def json_value(self, emit: Emit) -> Steps[None]:
        """Take one JSON value and emit it as it comes; within it, only brackets and strings are checked.

        Raises Malformed, then after what could be emitted.
        """
        first = yield from self.peek()
        if first in JSON.closing or first in JSON.quotes:
            yield from self._nested(Nesting(JSON), emit)
            return
        while True:
            end = self._matched_end(_SCALAR)
            if end < len(self._text) or self._ended:
                break
            if end - self._at > MAX_HEAD_CHARACTERS:
                break
            yield
        if end == self._at or end - self._at > MAX_HEAD_CHARACTERS:
            raise Malformed
        emit(self._text[self._at : end])
        self._at = end

    def rest(self, emit: Emit) -> Steps[None]:
        """Take all that comes."""
        while True:
            if self._at < len(self._text):
                emit(self._text[self._at :])
                self._at = len(self._text)
            if self._ended:
                return
            yield

    def python_rest(self, opened: str, *, limit: int) -> Steps[str]:
        """Take Python code up to where all brackets in `opened` are closed. Raises Malformed, also for a long one."""
        pieces: list[str] = []
        yield from self._nested(Nesting(PYTHON, opened), pieces.append, limit=limit)
        return "".join(pieces)

    def _nested(self, nesting: Nesting, emit: Emit, *, limit: int = sys.maxsize) -> Steps[None]:
        """What stands in brackets or quotes, of at most `limit` characters."""
        while True:
            start = self._at
            self._at = nesting.advance(self._text, start, min(len(self._text), start + limit))
            limit -= self._at - start
            if self._at > start:
                emit(self._text[start : self._at])
            if nesting.is_complete:
                return
            if nesting.is_broken or self._ended or not limit:
                raise Malformed
            yield

    def _matched_end(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        return match.end() if match else self._at

    def _start_of_prefix(self, marker: str) -> int:
        """From where on the text is the beginning of the marker and may become it; its end when it is not."""
        at = self._text.find(marker[0], max(self._at, len(self._text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(self._text[at:]):
                return at
            at = self._text.find(marker[0], at + 1)
        return len(self._text)
