"""Answers that must call tools: a grammar holds the model to an array of calls, whatever its own way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.grammar.shape import shape_violations
from twinstage.types import (
    ChatPrompt,
    Prompt,
    RawGenerationRequest,
    Tool,
    ToolChoice,
    ToolChoiceMode,
)
from twinstage.types.constraints import RawStructuredOutput

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_SAY_THE_TYPE = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
_OF_A_DOCUMENT = ("$id", "$schema")  # keywords that only have a meaning at its root
_HOLDS_SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_HOLDS_DATA = ("const", "enum", "default", "examples")


def must_call(prompt: Prompt | None) -> bool:
    """Whether the answer has no choice but to call a tool."""
    choice = prompt.tool_choice if isinstance(prompt, ChatPrompt) else None
    return choice is not None and choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


def with_forced_calls(raw: RawGenerationRequest) -> RawGenerationRequest:
    """The request with the grammar that its tool choice stands for, if it forces calls. Its fields were checked.

    Raises InvalidRequest for tools of which no grammar can be made.
    """
    prompt = raw.prompt
    if not must_call(prompt) or not isinstance(prompt, ChatPrompt) or prompt.tool_choice is None:
        return raw
    schema = schema_of_calls(prompt.tools, prompt.tool_choice, parallel=prompt.parallel_tool_calls is not False)
    grammar = RawStructuredOutput.json_schema(schema)
    if violations := list(shape_violations(grammar)):
        raise blame_tools(InvalidRequest(violations))
    return replace(raw, structured_output=grammar)


def blame_tools(error: InvalidRequest) -> InvalidRequest:
    """What is wrong with the grammar of forced calls is wrong with the tools, of which it was made."""
    return InvalidRequest([FieldViolation("tools", violation.description) for violation in error.violations])


def schema_of_calls(tools: tuple[Tool, ...], choice: ToolChoice, *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an array of calls: of the tool that is named, or of any."""
    is_named = choice.mode is ToolChoiceMode.NAMED
    allowed = [tool for tool in tools if not is_named or tool.name == choice.function]
    definitions: dict[str, Any] = {}
    calls = [_schema_of_call(tool, index, definitions) for index, tool in enumerate(allowed)]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": definitions,
    }
    if is_named or not parallel:
        schema["maxItems"] = 1
    return schema


def _schema_of_call(tool: Tool, index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """One call. The schema of its arguments moves as a whole to a definition at the root, its references with it."""
    parameters: dict[str, Any] = json.loads(tool.parameters) if tool.parameters else _NO_ARGUMENTS
    own = {key: value for key, value in parameters.items() if key not in _OF_A_DOCUMENT}
    if _SAY_THE_TYPE.isdisjoint(own):
        own["type"] = "object"  # what arguments are in any case
    document = parameters.get("$id", "")
    name = f"tool{index}"
    definitions[name] = _moved(own, f"#/$defs/{name}", document if isinstance(document, str) else "")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str, document: str) -> Any:
    """The schema with its references into itself (the document of that `$id`) as they are from its new place."""
    if isinstance(schema, list):
        return [_moved(entry, place, document) for entry in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # which is a document of its own
        return schema
    moved = {key: _moved_keyword(key, value, place, document) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        pointer = reference.removeprefix(document.rstrip("#"))
        if pointer in ("", "#") or pointer.startswith("#/"):
            moved["$ref"] = place + pointer.removeprefix("#")
    return moved


def _moved_keyword(keyword: str, value: Any, place: str, document: str) -> Any:
    if keyword in _HOLDS_DATA:
        return value
    if keyword in _HOLDS_SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _moved(schema, place, document) for name, schema in value.items()}
    return _moved(value, place, document)
