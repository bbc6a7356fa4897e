"""Tool parsers of models that write calls as JSON objects: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from typing import ClassVar

from twinstage.text.answers.calls import ToolParser
from twinstage.text.answers.json_text import is_unicode
from twinstage.text.answers.reader import Malformed, Steps

_NAME_KEYS = frozenset({"name", "tool_name", "function"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class JsonCalls(ToolParser):
    """One object, several of them, or an array, behind a marker; its keys may come in any order."""

    ends: ClassVar[tuple[str, ...]] = ()  # what may follow the calls
    opening: ClassVar[str] = ""  # a character with which the answer may begin calls that need no marker

    def at_beginning(self) -> Steps[None]:
        if not self.opening:
            return
        self.reader.mark()
        yield from self.reader.spaces()
        if (yield from self.reader.peek()) == self.opening:
            yield from self._attempt(self.calls(""))
        else:
            self.builder.content(self.reader.since_mark())

    def calls(self, marker: str) -> Steps[None]:
        yield from self.objects()
        yield from self.reader.spaces()
        if self.ends:
            yield from self.reader.literal(*self.ends)

    def objects(self) -> Steps[None]:
        """An array of calls, or calls in a row with whitespace, commas or semicolons between them."""
        yield from self.reader.spaces()
        if (yield from self.reader.literal("[")):
            yield from self._array()
            return
        while True:
            yield from self._object()
            yield from self.reader.spaces()
            if (yield from self.reader.literal(",", ";")):
                yield from self.reader.spaces()
            elif (yield from self.reader.peek()) != "{":
                return

    def _array(self) -> Steps[None]:
        while True:
            yield from self.reader.spaces()
            yield from self._object()
            yield from self.reader.spaces()
            if (yield from self.reader.expect(",", "]")) == "]":
                return

    def _object(self) -> Steps[None]:
        """One call."""
        call = _Call(self)
        yield from self.reader.expect("{")
        while True:
            yield from self.reader.spaces()
            key = _text((yield from self.reader.short_string()))
            yield from self.reader.spaces()
            yield from self.reader.expect(":")
            yield from self.reader.spaces()
            yield from call.value_of(key)
            yield from self.reader.spaces()
            if (yield from self.reader.expect(",", "}")) == "}":
                call.end()
                return


class _Call:
    """A call whose name may come before or behind its arguments."""

    def __init__(self, parser: JsonCalls) -> None:
        self._parser = parser
        self._reader = parser.reader
        self._name = ""
        self._arguments: str | None = None  # those that came before the name, or that could not be passed on at once
        self._has_begun = False

    def value_of(self, key: str) -> Steps[None]:
        """Read the value of a key. Raises Malformed."""
        if key in _NAME_KEYS and not self._name:
            self._name = self._parser.known(_text((yield from self._reader.short_string())))
        elif key in _ARGUMENT_KEYS and self._arguments is None:
            yield from self._read_arguments()
        else:
            yield from self._reader.json_value(_nowhere)

    def end(self) -> None:
        """All keys were read. Raises Malformed when the name was not among them."""
        if not self._name:
            raise Malformed
        if not self._has_begun:
            self._parser.begin(self._name)
            self._parser.builder.arguments(self._arguments or "{}")
        self._parser.complete()

    def _read_arguments(self) -> Steps[None]:
        if (yield from self._reader.peek()) == "{" and self._name:
            self._arguments, self._has_begun = "", True
            self._parser.begin(self._name)
            yield from self._reader.json_value(self._parser.builder.arguments)
            return
        pieces: list[str] = []
        yield from self._reader.json_value(pieces.append)
        self._arguments = _object_text("".join(pieces))


def _object_text(written: str) -> str:
    """The arguments as the text of an object: some models write that text as a string, or null for none.

    Raises Malformed.
    """
    if written == "null":
        return "{}"
    text = _text(written) if written.startswith('"') else written
    if not text.lstrip().startswith("{") or not is_unicode(text):
        raise Malformed
    return text


def _text(written: str) -> str:
    """What a JSON string says. Raises Malformed."""
    try:
        text = json.loads(written, strict=False)
    except ValueError:
        raise Malformed from None
    if not isinstance(text, str):
        raise Malformed
    return text


def _nowhere(text: str) -> None:
    """For values that no call has a use for."""


class HermesCalls(JsonCalls):
    """Hermes, Qwen2.5, Qwen3, Granite 4 and others: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

    markers = ("<tool_call>",)
    ends = ("</tool_call>",)


class LlamaCalls(JsonCalls):
    """Llama 3.1 to 3.3: the answer is {"name": ..., "parameters": ...}; it may begin with <|python_tag|>."""

    markers = ("<|python_tag|>",)
    opening = "{"


class GraniteCalls(JsonCalls):
    """Granite 3 and Phi-4-mini: an array behind <|tool_call|>."""

    markers = ("<|tool_call|>", "<tool_call>")
    ends = ("<|/tool_call|>", "</tool_call>")
    other_tokens = ("<|/tool_call|>",)


class CommandCalls(JsonCalls):
    """Command R7B and Command A: an array of tool_name and parameters."""

    markers = ("<|START_ACTION|>",)
    ends = ("<|END_ACTION|>",)
    other_tokens = ("<|END_ACTION|>",)


class NemotronCalls(JsonCalls):
    """Nemotron Nano 2: an array in <TOOLCALL>."""

    markers = ("<TOOLCALL>",)
    ends = ("</TOOLCALL>",)


class ArrayCalls(JsonCalls):
    """The answer is an array of calls and nothing else, as a grammar can demand of any model."""

    opening = "["
