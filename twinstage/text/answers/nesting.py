"""How deep in brackets and strings a text is that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEPTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """Which brackets and quotes there are; a backslash in a string escapes the next character."""

    closing: Mapping[str, str]
    quotes: str
    outside: re.Pattern[str]  # a run of other characters
    inside: Mapping[str, re.Pattern[str]]  # a run of plain characters in a string, by its quote


_IN_DOUBLE = re.compile(r'[^"\\]*')
_IN_SINGLE = re.compile(r"[^'\\]*")
JSON = Syntax(closing={"{": "}", "[": "]"}, quotes='"', outside=re.compile(r'[^"{}\[\]]*'), inside={'"': _IN_DOUBLE})
PYTHON = Syntax(
    closing={"{": "}", "[": "]", "(": ")"},
    quotes="\"'",
    outside=re.compile(r"[^\"'{}\[\]()]*"),
    inside={'"': _IN_DOUBLE, "'": _IN_SINGLE},
)


class Nesting:
    """Follows the brackets and strings of one value."""

    def __init__(self, syntax: Syntax, opened: str = "") -> None:
        """Brackets in `opened` were read before."""
        self._syntax = syntax
        self._expected = [syntax.closing[bracket] for bracket in opened]  # closing brackets, innermost last
        self._quote = ""  # of the string that is open
        self._is_escaped = False
        self.is_complete = False
        self.is_broken = False

    def advance(self, text: str, at: int, end: int) -> int:
        """Read from `at` as far as the value goes, and not beyond `end`; return where that is."""
        while at < end and not self.is_complete:
            if self._quote:
                at = self._advance_string(text, at, end)
                continue
            at = _end_of_run(self._syntax.outside, text, at, end)
            if at == end:
                break
            if not self._take(text[at]):
                self.is_broken = True
                break
            at += 1
        return at

    def _advance_string(self, text: str, at: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end_of_run(self._syntax.inside[self._quote], text, at, end)
        if at == end:
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
            self.is_complete = not self._expected
        return at + 1

    def _take(self, character: str) -> bool:
        """Take a quote or a bracket; return whether it may stand here."""
        closing = self._syntax.closing.get(character)
        if character in self._syntax.quotes:
            self._quote = character
        elif closing is not None:
            self._expected.append(closing)
            return len(self._expected) <= MAX_DEPTH
        elif not self._expected or self._expected.pop() != character:
            return False
        else:
            self.is_complete = not self._expected
        return True


def _end_of_run(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    match = pattern.match(text, at, end)
    return match.end() if match else at
