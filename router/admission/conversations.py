"""The rules of conversations and tools: what Chat and RenderChat take. Each violation is added with its path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from router.admission.schemas import SchemaRules
from router.limits import MAX_TOOL_NAME_CHARACTERS
from router.violations import MAX_LISTED_PER_FIELD, Violations
from twinstage.text.chat_template import option_violations
from twinstage.types import ChatMessage, ChatPrompt, Tool, ToolChoiceMode

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}")
Problem = tuple[str, str]  # a path and what is wrong there


def check_conversation(violations: Violations, prompt: ChatPrompt) -> None:
    """Judge messages, tools, and what is said about them."""
    if not prompt.messages:
        violations.add("messages", "must not be empty")
    for problems in (_message_problems(prompt), _tool_problems(prompt.tools), _choice_problems(prompt)):
        for field, description in islice(problems, MAX_LISTED_PER_FIELD):
            violations.add(field, description)
    if prompt.messages:
        violations.extend(option_violations(prompt))
    if prompt.reasoning_effort and prompt.reasoning_effort not in REASONING_EFFORTS:
        violations.add("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}")


def _message_problems(prompt: ChatPrompt) -> Iterator[Problem]:
    known_ids: set[str] = set()
    for index, message in enumerate(prompt.messages):
        path = f"messages[{index}]"
        if not message.role:
            yield f"{path}.role", "must not be empty"
        yield from _answer_problems(path, message, known_ids)
        yield from _call_problems(path, message, known_ids)
        if message.reasoning and message.role != "assistant":
            yield f"{path}.reasoning", "only messages of the assistant have it"


def _answer_problems(path: str, message: ChatMessage, known_ids: set[str]) -> Iterator[Problem]:
    """Of a message that answers a call."""
    if message.role == "tool":
        if not message.tool_call_id:
            yield f"{path}.tool_call_id", "must name the call that this message answers"
        elif message.tool_call_id not in known_ids:
            yield f"{path}.tool_call_id", "names no call of an earlier message"
    elif message.tool_call_id:
        yield f"{path}.tool_call_id", "only messages of role tool answer a call"


def _call_problems(path: str, message: ChatMessage, known_ids: set[str]) -> Iterator[Problem]:
    """Of a message's own calls, whose ids become known."""
    if message.tool_calls and message.role != "assistant":
        yield f"{path}.tool_calls", "only messages of the assistant have calls"
    own_ids: set[str] = set()
    for index, call in enumerate(message.tool_calls):
        call_path = f"{path}.tool_calls[{index}]"
        if not call.id:
            yield f"{call_path}.id", "must not be empty"
        elif call.id in own_ids:
            yield f"{call_path}.id", "is the id of another call of this message"
        if not call.name:
            yield f"{call_path}.name", "must not be empty"
        problem = _object_problem(call.arguments)
        if problem:
            yield f"{call_path}.arguments", problem
        own_ids.add(call.id)
    known_ids |= own_ids


def _tool_problems(tools: tuple[Tool, ...]) -> Iterator[Problem]:
    positions: dict[str, int] = {}
    rules = SchemaRules()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            yield (
                f"{path}.name",
                f"must have 1 to {MAX_TOOL_NAME_CHARACTERS} letters, digits, underscores, dashes and dots",
            )
        elif positions.setdefault(tool.name, index) != index:
            yield f"{path}.name", f"is the name of tools[{positions[tool.name]}], too"
        if not tool.parameters:
            continue
        problem = _object_problem(tool.parameters)
        problems = iter([problem]) if problem else _parameter_problems(rules, json.loads(tool.parameters))
        yield from ((f"{path}.parameters", description) for description in islice(problems, MAX_LISTED_PER_FIELD))


def _parameter_problems(rules: SchemaRules, schema: dict[str, Any]) -> Iterator[str]:
    if schema.get("type", "object") != "object":
        yield 'must be the schema of an object: its type must be "object"'
    yield from rules.problems(schema)


def _choice_problems(prompt: ChatPrompt) -> Iterator[Problem]:
    choice = prompt.tool_choice
    if prompt.tools and "tools" in prompt.chat_template_kwargs:
        yield "chat_template_kwargs.tools", "is given by tools already"
    if choice is None:
        return
    names = [tool.name for tool in prompt.tools]
    match choice.mode:
        case ToolChoiceMode.UNKNOWN:
            yield "tool_choice.mode", "must be auto, none or required"
        case ToolChoiceMode.NAMED if choice.function not in names:
            yield "tool_choice.function", f"must be the name of a tool of the request: {', '.join(names) or 'none'}"
        case ToolChoiceMode.REQUIRED if not names:
            yield "tool_choice.mode", "required needs tools"


def _object_problem(text: str) -> str:
    """What is wrong with the text of a JSON object; empty text stands for an empty one."""
    if not text:
        return ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"must be JSON: {str(error)[:100]}"
    return "" if isinstance(value, dict) else "must be the text of a JSON object"
