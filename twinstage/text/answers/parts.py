"""What an answer is made of, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from twinstage.types import ToolCallDelta


@dataclass(slots=True)
class AnswerDelta:
    """What a piece of text has added to an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerBuilder:
    """Takes the parts that a parser finds.

    Whitespace around reasoning, and between content and calls, is nobody's: it is held back until text follows it.
    """

    def __init__(self, *, new_call_id: Callable[[], str], parallel: bool) -> None:
        self._new_call_id = new_call_id
        self._max_calls = None if parallel else 1
        self._content, self._reasoning = _HeldText(), _HeldText()
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []  # each with the pieces of its arguments
        self._call_ids: set[str] = set()
        self._num_calls = 0
        self._num_complete = 0

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls, and each has all its arguments."""
        return self._num_calls > 0 and self._num_calls == self._num_complete

    def take(self) -> AnswerDelta:
        """What was added since the last time."""
        calls, self._calls = self._calls, []
        return AnswerDelta(
            content=self._content.take(),
            reasoning=self._reasoning.take(),
            tool_calls=[replace(call, arguments="".join(pieces)) for call, pieces in calls],
        )

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        self._reasoning.add(text, strips_beginning=True)

    def content(self, text: str) -> None:
        """More content."""
        self._content.add(text, strips_beginning=self._num_calls > 0)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call of a tool that the request knows; its arguments follow. No two calls have the same id."""
        self._content.drop_space()
        self._num_calls += 1
        if self._is_wanted:
            if not call_id or call_id in self._call_ids:  # a model may count its calls anew
                call_id = self._new_call_id()
            self._call_ids.add(call_id)
            call = ToolCallDelta(index=self._num_calls - 1, id=call_id, name=name)
            self._calls.append((call, []))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if not self._is_wanted or not text:
            return
        if not self._calls:
            self._calls.append((ToolCallDelta(index=self._num_calls - 1), []))
        self._calls[-1][1].append(text)

    def end_call(self) -> None:
        """The call that was begun last has all its arguments."""
        self._num_complete += 1

    def end(self) -> None:
        """Nothing follows: whitespace at the end of the content is part of it, and behind a call it is not."""
        if not self._num_calls:
            self._content.show_space()

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls


class _HeldText:
    """Text that comes in pieces, whose end is held back where it is whitespace."""

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._held: list[str] = []  # whitespace
        self._has_text = False

    def add(self, text: str, *, strips_beginning: bool) -> None:
        """Add a piece; with `strips_beginning`, whitespace before the first text is left out."""
        body = text.rstrip()
        if body:
            if strips_beginning and not self._has_text:
                self.drop_space()
                self._shown.append(body.lstrip())
            else:
                self.show_space()
                self._shown.append(body)
            self._has_text = True
        self._held.append(text[len(body) :])

    def drop_space(self) -> None:
        self._held.clear()

    def show_space(self) -> None:
        self._shown += self._held
        self._held.clear()

    def take(self) -> str:
        """What may be shown and was not taken yet."""
        text = "".join(self._shown)
        self._shown.clear()
        return text
