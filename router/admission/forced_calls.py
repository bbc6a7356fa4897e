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
_DEFINITIONS = ("$defs", "definitions")


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
