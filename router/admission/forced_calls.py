"""Answers that must call tools: a grammar holds the model to an array of calls, whatever its own way."""

from __future__ import annotations

import json
from typing import Any

from twinstage.types import Tool, ToolChoice, ToolChoiceMode

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")


def must_call(choice: ToolChoice | None) -> bool:
    """Whether the model has no choice but to call a tool."""
    return choice is not None and choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


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
    }
    if is_named or not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _schema_of_call(tool: Tool, index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """One call. Definitions of the tool's own schema move to the root, where references look for them."""
    parameters: dict[str, Any] = json.loads(tool.parameters) if tool.parameters else _NO_ARGUMENTS
    prefix = f"tool{index}."
    for name in _DEFINITIONS:
        own_definitions: dict[str, Any] = parameters.get(name, {})
        for key, schema in own_definitions.items():
            definitions[prefix + key] = _with_references(schema, prefix)
    own = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": _with_references(own, prefix)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _with_references(schema: Any, prefix: str) -> Any:
    """The schema with its references to the definitions where they are now."""
    if isinstance(schema, list):
        return [_with_references(entry, prefix) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _with_references(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    for name in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{name}/"):
            changed["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{name}/')}"
    return changed
