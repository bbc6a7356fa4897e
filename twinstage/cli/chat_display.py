"""How a conversation looks: answers on standard output, what is said about them on standard error."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from twinstage.cli.output import usage_line
from twinstage.client import ChatMessage, Delta, Summary, ToolCall
from twinstage.types import Finish

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters in a model's text are not for the terminal; line breaks and tabs are.
_CONTROL = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class AnswerDisplay:
    """Shows one answer after the other. Reasoning is dim, and left out where the output is no terminal."""

    def __init__(self, out: TextIO | None = None, notes: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._notes = notes or sys.stderr
        self._is_terminal = self._out.isatty()
        self._is_dim = False
        self._at_line_start = True

    def delta(self, delta: Delta) -> None:
        """Show what has come."""
        if delta.reasoning and self._is_terminal:
            self._write(delta.reasoning, dim=True)
        if delta.text:
            if self._is_dim:
                self._write("\n\n", dim=False)
            self._write(delta.text, dim=False)

    def end(self, message: ChatMessage) -> None:
        """The answer has ended: show its calls."""
        self.line()
        for call in message.tool_calls:
            self._write(f"→ {written_call(call)}", dim=False)
            self.line()

    def totals(self, finish: Finish | None, summary: Summary | None) -> None:
        """What the answer took, and why it ended."""
        reason = finish.reason.value if finish is not None else "nothing"
        self.note(usage_line(summary, finish=reason) if summary is not None else f"finished by {reason}")

    def line(self) -> None:
        """Begin a line, unless one has begun."""
        if not self._at_line_start:
            self._write("\n", dim=False)

    def note(self, text: str) -> None:
        """Something that is no part of an answer."""
        text = text.translate(_CONTROL)
        print(f"{_DIM}{text}{_PLAIN}" if self._notes.isatty() else text, file=self._notes, flush=True)

    def _write(self, text: str, *, dim: bool) -> None:
        if self._is_terminal:
            text = text.translate(_CONTROL)
            if dim is not self._is_dim:
                self._out.write(_DIM if dim else _PLAIN)
        self._is_dim = dim
        self._out.write(text)
        self._out.flush()
        if text:
            self._at_line_start = text.endswith("\n")


def written_call(call: ToolCall) -> str:
    """A call as people read it: get_weather(city="Paris", days=3)."""
    try:
        arguments = json.loads(call.arguments)
        written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    except (ValueError, AttributeError):
        written = call.arguments
    return f"{call.name}({written})"
