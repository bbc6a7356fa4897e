"""What a chat template gets to see of messages and tools: the objects that Transformers documents.

An assistant's calls are {"id", "type": "function", "function": {"name", "arguments"}}, and a tool's description is
{"type": "function", "function": {"name", "description", "parameters"}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinstage.types import ChatPrompt, Tool, ToolCall, ToolChoiceMode

# Some templates ask whether a message with calls has content at all, others join it with text in any case.
_ASKS_FOR_NO_CONTENT = re.compile(r"""(\[\s*['"]content['"]\s*\]|\.content|\bcontent)\s+is\s+(not\s+)?none""")


class ToolArguments(dict[str, Any]):
    """Arguments of a call. Most templates read them as an object, some as its JSON text, and find both."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def message_variables(prompt: ChatPrompt, template: str) -> list[dict[str, Any]]:
    """The messages as this template expects them."""
    names = {call.id: call.name for message in prompt.messages for call in message.tool_calls}
    leaves_out_content = _ASKS_FOR_NO_CONTENT.search(template) is not None
    messages = []
    for message in prompt.messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        name = message.name or names.get(message.tool_call_id)
        if name:
            entry["name"] = name
        if message.tool_calls:
            entry["tool_calls"] = [_call_variables(call) for call in message.tool_calls]
            if not message.content and leaves_out_content:
                entry["content"] = None
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            entry["reasoning_content"] = entry["thinking"] = message.reasoning  # as Transformers names it
        messages.append(entry)
    return messages


def _call_variables(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def tool_variables(prompt: ChatPrompt) -> list[dict[str, Any]] | None:
    """The tools, unless there are none to call: a model that sees tools calls them."""
    choice = prompt.tool_choice
    if not prompt.tools or (choice is not None and choice.mode is ToolChoiceMode.NONE):
        return None
    return [{"type": "function", "function": _function_variables(tool)} for tool in prompt.tools]


def _function_variables(tool: Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": parameters}


def effort_variables(effort: str) -> dict[str, Any]:
    """How much to reason, by the names that templates know; nothing when the request does not say."""
    if not effort:
        return {}
    reasons = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": reasons, "thinking": reasons}


def with_readable_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as `ToolArguments`."""
    return [
        {**message, "tool_calls": [_with_readable_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _with_readable_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": ToolArguments(function["arguments"])}}
