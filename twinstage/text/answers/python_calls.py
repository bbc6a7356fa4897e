"""Tool parsers of models that write calls as Python: [name(key=value), ...]."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from twinstage.text.answers.calls import ToolParser
from twinstage.text.answers.json_text import json_text
from twinstage.text.answers.reader import Malformed, Steps

MAX_CHARACTERS = 64 * 1024  # of a list of calls, which is read as a whole

_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonCalls(ToolParser):
    """Llama 3.2 and 4 as prompted for it: the answer is a list of calls, passed on when it is complete."""

    markers = ("<|python_start|>",)
    ends: tuple[str, ...] = ("<|python_end|>",)
    other_tokens = ("<|python_end|>",)

    def at_beginning(self) -> Steps[None]:
        self.reader.mark()
        yield from self.reader.spaces()
        if (yield from self.reader.peek()) == "[":
            yield from self._attempt(self.calls(""))
        else:
            self.builder.content(self.reader.since_mark())

    def calls(self, marker: str) -> Steps[None]:
        yield from self.reader.spaces()
        yield from self.reader.expect("[")
        yield from self.reader.spaces()
        first = yield from self.reader.word()
        yield from self.reader.expect("(")
        rest = yield from self.reader.python_rest("[(", limit=MAX_CHARACTERS)
        for name, arguments in self._read(f"[{first}({rest}"):
            self.begin(name)
            self.builder.arguments(arguments)
            self.complete()
        yield from self.reader.spaces()
        yield from self.reader.literal(*self.ends)

    def _read(self, written: str) -> list[tuple[str, str]]:
        """Names and arguments of the calls. Raises Malformed, for all of them, when one is wrong."""
        try:
            with warnings.catch_warnings():  # of escapes that Python does not know
                warnings.simplefilter("ignore")
                tree = ast.parse(written, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise Malformed from None
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed
        return [self._call(entry) for entry in tree.elts]

    def _call(self, entry: ast.expr) -> tuple[str, str]:
        if not isinstance(entry, ast.Call) or entry.args:
            raise Malformed
        name = self.known(ast.unparse(entry.func))
        values: dict[str, Any] = {}
        for keyword in entry.keywords:
            if keyword.arg is None or keyword.arg in values:
                raise Malformed
            values[keyword.arg] = _value(keyword.value)
        try:
            return name, json_text(values)
        except (TypeError, ValueError):  # a set, bytes, a complex number
            raise Malformed from None


def _value(node: ast.expr) -> Any:
    """The value of a constant, list or dictionary; JSON's own names of constants are understood, too."""
    match node:
        case ast.Name() if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        case ast.List():
            return [_value(entry) for entry in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise Malformed
    return node.value


class LiquidCalls(PythonCalls):
    """LFM2: the list stands between tags."""

    markers = ("<|tool_call_start|>",)
    ends = ("<|tool_call_end|>",)
    other_tokens = ("<|tool_call_end|>",)

    def at_beginning(self) -> Steps[None]:
        return
        yield
