"""What an answer is made of, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

    Whitespace between content and calls is nobody's: it is held back until text follows it, and a call drops it.
    """

    def __init__(self, *, new_call_id: Callable[[], str], parallel: bool) -> None:
        self._new_call_id = new_call_id
        self._max_calls = None if parallel else 1
        self._delta = AnswerDelta()
        self._held_space = ""
        self._held_reasoning_space = ""
        self._has_reasoning = False
        self._has_content = False
        self._num_calls = 0
        self._num_complete = 0

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls, and each has all its arguments."""
        return self._num_calls > 0 and self._num_calls == self._num_complete

    def take(self) -> AnswerDelta:
        """What was added since the last time."""
        taken, self._delta = self._delta, AnswerDelta()
        return taken

    def reasoning(self, text: str) -> None:
        """More reasoning; whitespace around it is left out."""
        text = self._held_reasoning_space + text
        if not self._has_reasoning:
            text = text.lstrip()
        shown = text.rstrip()
        self._held_reasoning_space = text[len(shown) :]
        self._delta.reasoning += shown
        self._has_reasoning = self._has_reasoning or bool(shown)

    def content(self, text: str) -> None:
        """More content; its end is held back where it is whitespace."""
        text = self._held_space + text
        if self._num_calls and not self._has_content:
            text = text.lstrip()
        shown = text.rstrip()
        self._held_space = text[len(shown) :]
        self._delta.content += shown
        self._has_content = self._has_content or bool(shown)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call of a tool that the request knows; its arguments follow."""
        self._held_space = ""
        self._num_calls += 1
        if self._is_wanted:
            self._add(ToolCallDelta(index=self._num_calls - 1, id=call_id or self._new_call_id(), name=name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that was begun last."""
        if self._is_wanted and text:
            self._add(ToolCallDelta(index=self._num_calls - 1, arguments=text))

    def end_call(self) -> None:
        """The call that was begun last has all its arguments."""
        self._num_complete += 1

    def end(self) -> None:
        """Nothing follows: whitespace at the end of the content is part of it, and behind a call it is not."""
        if not self._num_calls:
            self._delta.content += self._held_space
        self._held_space = ""

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _add(self, delta: ToolCallDelta) -> None:
        last = self._delta.tool_calls[-1] if self._delta.tool_calls else None
        if last is None or last.index != delta.index:
            self._delta.tool_calls.append(delta)
        else:
            self._delta.tool_calls[-1] = ToolCallDelta(
                index=last.index, id=last.id, name=last.name, arguments=last.arguments + delta.arguments
            )
