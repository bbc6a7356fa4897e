"""The frame of all tool parsers: content, in which a marker begins calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from twinstage.text.answers.parts import AnswerBuilder
from twinstage.text.answers.reader import Malformed, Reader, Steps
from twinstage.types import Tool


class ToolParser:
    """Finds the calls in an answer; one answer each.

    A call begins once the name of a tool of the request was read and its arguments begin; from then on the client has
    it, and what the model writes as its arguments, right or wrong, is passed on. What is wrong before that is content.
    """

    markers: ClassVar[tuple[str, ...]] = ()  # each begins calls, anywhere
    other_tokens: ClassVar[tuple[str, ...]] = ()  # special tokens within calls

    def __init__(self, reader: Reader, builder: AnswerBuilder, tools: Sequence[Tool]) -> None:
        self.reader = reader
        self.builder = builder
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}

    def run(self) -> Steps[None]:
        """Read the whole answer."""
        yield from self.at_beginning()
        while True:
            marker = yield from self.reader.until(*self.markers, emit=self.builder.content)
            if not marker:
                return
            self.reader.mark(behind=len(marker))
            yield from self._attempt(self.calls(marker))

    def at_beginning(self) -> Steps[None]:
        """Calls that need no marker, as they begin the answer."""
        return
        yield

    def calls(self, marker: str) -> Steps[None]:
        """The calls behind a marker, with what ends them. Raises Malformed."""
        raise NotImplementedError

    def _attempt(self, steps: Steps[None]) -> Steps[None]:
        """Read calls; what turns out not to be one is content."""
        try:
            yield from steps
        except Malformed:
            self.builder.content(self.reader.since_mark())
        else:
            self.reader.since_mark()

    def begin(self, name: str, call_id: str = "") -> None:
        """A call begins; what was read since the mark is part of it."""
        self.reader.since_mark()
        self.builder.begin_call(name, call_id)

    def complete(self) -> None:
        """The call that was begun is complete; what follows may be content again."""
        self.builder.end_call()
        self.reader.mark()

    def call_with_object(self, name: str, call_id: str = "") -> Steps[None]:
        """A call whose arguments, a JSON object, come next. Raises Malformed."""
        yield from self.reader.spaces()
        if (yield from self.reader.peek()) != "{":
            raise Malformed
        self.begin(name, call_id)
        yield from self.reader.json_value(self.builder.arguments)
        self.complete()

    def known(self, name: Any) -> str:
        """The name, if it is one of the request's tools. Raises Malformed."""
        if not isinstance(name, str) or name not in self.tools:
            raise Malformed
        return name

    def schemas_of(self, name: str) -> Mapping[str, Any]:
        """The schemas of the tool's arguments by name, as far as it has any."""
        try:
            properties = json.loads(self.tools[name].parameters)["properties"]
        except (ValueError, KeyError, TypeError):
            return {}
        return properties if isinstance(properties, dict) else {}
