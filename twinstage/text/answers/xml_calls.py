"""Tool parsers of models that write each argument between tags of its own.

Arguments of type string are taken as they are, others as JSON where they are such. They are passed on one by one.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from twinstage.text.answers.calls import ToolParser
from twinstage.text.answers.json_text import json_text
from twinstage.text.answers.reader import Steps


class XmlCalls(ToolParser):
    """Calls of the form FUNCTION name> {PARAMETER key> value}, in tags that each model spells its own way."""

    function: ClassVar[str]  # opens a call, up to the name
    function_name_end: ClassVar[str]
    function_end: ClassVar[str]
    parameter: ClassVar[str]  # opens an argument, up to its name
    parameter_name_end: ClassVar[str]
    parameter_end: ClassVar[str]
    end: ClassVar[str]  # closes all calls

    def calls(self, marker: str) -> Steps[None]:
        if marker != self.function:
            yield from self.reader.spaces()
            yield from self.reader.expect(self.function)
        while True:
            yield from self._call()
            yield from self.reader.spaces()
            if not (yield from self.reader.literal(self.function)):
                break
        yield from self.reader.literal(self.end)

    def _call(self) -> Steps[None]:
        head, _ = yield from self.reader.head(self.function_name_end)
        name = self.known(head.strip())
        self.begin(name)
        arguments = _Arguments(self, name)
        while True:
            yield from self.reader.spaces()
            if (yield from self.reader.expect(self.parameter, self.function_end, self.end)) != self.parameter:
                break
            key, _ = yield from self.reader.head(self.parameter_name_end)
            pieces: list[str] = []
            closed = yield from self.reader.until(self.parameter_end, self.function_end, emit=pieces.append)
            if not closed:
                return  # the answer ends within the argument: the call stays incomplete
            arguments.add(key.strip(), "".join(pieces))
            if closed != self.parameter_end:
                break
        arguments.end()
        self.complete()


class _Arguments:
    """The arguments of one call on their way out."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        self._parser = parser
        self._schemas = parser.schemas_of(name)
        self._is_first = True

    def add(self, key: str, written: str) -> None:
        value = _value_text(written.removeprefix("\n").removesuffix("\n"), self._schemas.get(key))
        opening = "{" if self._is_first else ", "
        self._is_first = False
        self._parser.builder.arguments(f"{opening}{json_text(key)}: {value}")

    def end(self) -> None:
        self._parser.builder.arguments("{}" if self._is_first else "}")


def _value_text(written: str, schema: Any) -> str:
    """The JSON that an argument's text stands for."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "boolean" and written.strip() in ("True", "False"):  # as Python writes them
        return written.strip().lower()
    if kind != "string":
        try:
            return json_text(json.loads(written))
        except (ValueError, RecursionError):
            pass  # no JSON, or numbers that JSON does not have
    return json_text(written)


class QwenXmlCalls(XmlCalls):
    """Qwen3-Coder and Qwen3.5: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    markers = ("<tool_call>", "<function=")
    function, function_name_end, function_end = "<function=", ">", "</function>"
    parameter, parameter_name_end, parameter_end = "<parameter=", ">", "</parameter>"
    end = "</tool_call>"


class SeedCalls(QwenXmlCalls):
    """Seed-OSS."""

    markers = ("<seed:tool_call>", "<function=")
    end = "</seed:tool_call>"


class MiniMaxCalls(XmlCalls):
    """MiniMax M2: <invoke name="name"><parameter name="key">value</parameter></invoke>."""

    markers = ("<minimax:tool_call>",)
    function, function_name_end, function_end = '<invoke name="', '">', "</invoke>"
    parameter, parameter_name_end, parameter_end = '<parameter name="', '">', "</parameter>"
    end = "</minimax:tool_call>"


class GlmCalls(ToolParser):
    """GLM 4.5 to 4.7: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

    markers = ("<tool_call>",)

    def calls(self, marker: str) -> Steps[None]:
        head, found = yield from self.reader.head("<arg_key>", "</tool_call>")
        name = self.known(head.strip())
        self.begin(name)
        arguments = _Arguments(self, name)
        while found == "<arg_key>":
            key, _ = yield from self.reader.head("</arg_key>")
            yield from self.reader.spaces()
            yield from self.reader.expect("<arg_value>")
            pieces: list[str] = []
            if not (yield from self.reader.until("</arg_value>", emit=pieces.append)):
                return  # the answer ends within the argument: the call stays incomplete
            arguments.add(key.strip(), "".join(pieces))
            yield from self.reader.spaces()
            found = yield from self.reader.expect("<arg_key>", "</tool_call>")
        arguments.end()
        self.complete()
