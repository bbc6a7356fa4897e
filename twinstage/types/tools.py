"""Tools that a model may ask for, the calls it makes, and how its answer is to be read."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask its caller to run. `parameters`: the JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for. `arguments` is a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str = "{}"


class ToolChoiceMode(enum.Enum):
    """Whether the model may or must call tools; `UNKNOWN` is what a client sent that this version does not know."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools an answer calls; `function` names the one that it must call, with `NAMED` alone."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """The beginning of a call, which has `id` and `name`, or more of its arguments. Calls count from 0."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How a model's text becomes reasoning, content and tool calls. An empty parser: that part is not looked for.

    `starts_in_reasoning`: the prompt ends within the reasoning, so its start tag is not part of the answer.
    """

    tool_parser: str = ""
    tools: tuple[Tool, ...] = ()
    parallel_tool_calls: bool = True
    reasoning_parser: str = ""
    starts_in_reasoning: bool = False
