"""One answer of a model: text in, typed parts out.

text -> reasoning | rest -> content | tool calls
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from twinstage.text.answers.parts import AnswerBuilder, AnswerDelta
from twinstage.text.answers.reader import Reader, Steps
from twinstage.text.answers.reasoning import REASONING_STYLES, split_reasoning
from twinstage.text.answers.registry import TOOL_PARSERS
from twinstage.types import AnswerFormat, Finish, FinishReason

_ALPHANUMERIC = string.ascii_letters + string.digits
_ID_CHARACTERS = {"mistral": 9}  # its template takes no others


def new_call_id(tool_parser: str) -> str:
    """An id that no other call has, of a form that the model's template takes."""
    length = _ID_CHARACTERS.get(tool_parser)
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))


class AnswerParser:
    """Reads one answer. Without a parser for tools or reasoning, its text is content."""

    def __init__(self, format: AnswerFormat, *, new_id: Callable[[], str] | None = None) -> None:
        self._builder = AnswerBuilder(
            new_call_id=new_id or (lambda: new_call_id(format.tool_parser)), parallel=format.parallel_tool_calls
        )
        self._answer = _Stage()
        if format.tool_parser:
            parser = TOOL_PARSERS[format.tool_parser]
            self._answer.start(parser(self._answer.reader, self._builder, format.tools).run())
        else:
            self._answer.start(self._answer.reader.rest(self._builder.content))
        self._text = self._answer
        if format.reasoning_parser:
            self._text = _Stage()
            self._text.start(
                split_reasoning(
                    self._text.reader,
                    REASONING_STYLES[format.reasoning_parser],
                    self._builder,
                    starts_inside=format.starts_in_reasoning,
                    emit=self._answer.feed,
                )
            )

    def push(self, text: str) -> AnswerDelta:
        """Take the next piece; return what is certain now."""
        if text:
            self._text.feed(text)
        return self._builder.take()

    def finish(self, finish: Finish) -> tuple[AnswerDelta, Finish]:
        """The text has ended: return what was held back, and how the answer ended.

        A model that stops once its calls are complete has asked for tools.
        """
        self._text.end()
        self._answer.end()
        self._builder.end()
        if finish.reason is FinishReason.STOP and self._builder.calls_are_complete:
            finish = Finish(reason=FinishReason.TOOL_CALLS)
        return self._builder.take(), finish


class _Stage:
    """Steps and the text that they read."""

    def __init__(self) -> None:
        self.reader = Reader()
        self._steps: Steps[None] | None = None

    def start(self, steps: Steps[None]) -> None:
        self._steps = steps
        self._advance()

    def feed(self, text: str) -> None:
        self.reader.feed(text)
        self._advance()

    def end(self) -> None:
        self.reader.end()
        self._advance()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
