"""The whole message that the deltas of an answer make."""

from __future__ import annotations

from collections.abc import Iterable

from twinstage.text.answers.parts import AnswerDelta
from twinstage.types import ChatMessage, ToolCall, ToolCallDelta


class MessageJoiner:
    """Joins deltas, in the order in which they came."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[list[str]] = []  # of each call

    def add(self, *, content: str = "", reasoning: str = "", tool_calls: Iterable[ToolCallDelta] = ()) -> None:
        self._content.append(content)
        self._reasoning.append(reasoning)
        for delta in tool_calls:
            if delta.index == len(self._calls):
                self._calls.append(delta)
                self._arguments.append([])
            self._arguments[delta.index].append(delta.arguments)

    def add_delta(self, delta: AnswerDelta) -> None:
        self.add(content=delta.content, reasoning=delta.reasoning, tool_calls=delta.tool_calls)

    def message(self) -> ChatMessage:
        """What has come so far, as a message that can be sent back."""
        calls = (
            ToolCall(id=call.id, name=call.name, arguments="".join(arguments) or "{}")
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        )
        return ChatMessage(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(calls),
        )
