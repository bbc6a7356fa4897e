"""Conversations and tools that are refused: every violation at once, each with its path."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from router.admission.answers import ParserChoice, read_reasoning_parsers, read_tool_parsers
from router.admission.conversations import check_conversation
from router.admission.schemas import SchemaRules
from router.config import RouterSettings
from router.violations import Violations
from twinstage.cli.cluster_flags import ClusterFlags, EngineFlags
from twinstage.errors import ConfigError, InvalidRequest
from twinstage.settings import read_settings
from twinstage.types import ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice, ToolChoiceMode

USER = ChatMessage(role="user", content="Hi")
CALL = ToolCall(id="1", name="now")
CALLING = ChatMessage(role="assistant", tool_calls=(CALL,))
RESULT = ChatMessage(role="tool", content="noon", tool_call_id="1")
NOW = Tool(name="now")
NAMED = ToolChoiceMode.NAMED


def violations_of(**prompt: Any) -> dict[str, str]:
    """The paths that are refused, with what is wrong."""
    violations = Violations()
    check_conversation(violations, ChatPrompt(**{"messages": (USER,), **prompt}))
    try:
        violations.raise_any()
    except InvalidRequest as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


def message(**fields: Any) -> ChatMessage:
    return ChatMessage(**{"role": "assistant", **fields})


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"messages": ()}, "messages"),
        ({"messages": (message(role=""),)}, "messages[0].role"),
        ({"messages": (USER, message(role="tool"))}, "messages[1].tool_call_id"),
        ({"messages": (USER, RESULT)}, "messages[1].tool_call_id"),
        ({"messages": (CALLING, message(role="user", tool_call_id="1"))}, "messages[1].tool_call_id"),
        ({"messages": (message(role="user", tool_calls=(CALL,)),)}, "messages[0].tool_calls"),
        ({"messages": (message(role="user", reasoning="Hm"),)}, "messages[0].reasoning"),
        ({"messages": (message(tool_calls=(ToolCall(id="", name="f"),)),)}, "messages[0].tool_calls[0].id"),
        ({"messages": (message(tool_calls=(CALL, CALL)),)}, "messages[0].tool_calls[1].id"),
        ({"messages": (message(tool_calls=(ToolCall(id="1", name=""),)),)}, "messages[0].tool_calls[0].name"),
        (
            {"messages": (message(tool_calls=(ToolCall(id="1", name="f", arguments="{"),)),)},
            "messages[0].tool_calls[0].arguments",
        ),
        (
            {"messages": (message(tool_calls=(ToolCall(id="1", name="f", arguments="[]"),)),)},
            "messages[0].tool_calls[0].arguments",
        ),
        ({"tools": (Tool(name=""),)}, "tools[0].name"),
        ({"tools": (Tool(name="a b"),)}, "tools[0].name"),
        ({"tools": (Tool(name="x" * 65),)}, "tools[0].name"),
        ({"tools": (NOW, NOW)}, "tools[1].name"),
        ({"tools": (Tool(name="f", parameters="{"),)}, "tools[0].parameters"),
        ({"tools": (Tool(name="f", parameters="[" * 100_000),)}, "tools[0].parameters"),
        ({"tools": (Tool(name="f", parameters='"object"'),)}, "tools[0].parameters"),
        ({"tools": (Tool(name="f", parameters='{"type": "array"}'),)}, "tools[0].parameters"),
        ({"tools": (NOW,), "tool_choice": ToolChoice(mode=NAMED, function="f")}, "tool_choice.function"),
        ({"tool_choice": ToolChoice(mode=ToolChoiceMode.REQUIRED)}, "tool_choice.mode"),
        ({"tool_choice": ToolChoice(mode=ToolChoiceMode.UNKNOWN)}, "tool_choice.mode"),
        ({"tools": (NOW,), "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"reasoning_effort": "great"}, "reasoning_effort"),
    ],
)
def test_one_violation(prompt: dict[str, Any], field: str) -> None:
    found = violations_of(**prompt)
    assert list(found) == [field]
    assert 0 < len(found[field]) < 300


def test_all_at_once() -> None:
    found = violations_of(
        messages=(USER, message(role="tool"), message(role="")),
        tools=(NOW, NOW, Tool(name="f", parameters="5")),
        tool_choice=ToolChoice(mode=NAMED, function="g"),
        reasoning_effort="great",
        continue_final_message=True,
        chat_template_kwargs={"messages": [], "add_generation_prompt": True},
    )
    assert set(found) == {
        "add_generation_prompt",
        "chat_template_kwargs.messages",
        "messages[1].tool_call_id",
        "messages[2].role",
        "tools[1].name",
        "tools[2].parameters",
        "tool_choice.function",
        "reasoning_effort",
    }


def test_a_long_list_of_bad_messages_does_not_crowd_out_the_rest() -> None:
    found = violations_of(messages=(message(role=""),) * 100, tools=(NOW, NOW))
    assert "tools[1].name" in found
    assert len(found) < 20


def test_what_is_right_is_taken() -> None:
    schema = json.dumps({"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]})
    assert not violations_of(
        messages=(USER, CALLING, RESULT, message(content="Noon.", reasoning="Hm")),
        tools=(NOW, Tool(name="a.b-C_1", description="d", parameters=schema)),
        tool_choice=ToolChoice(mode=NAMED, function="now"),
        reasoning_effort="high",
    )


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (5, "the schema must be an object"),
        ({"type": "text"}, "type must be one of"),
        ({"required": "x"}, "required must be a list"),
        ({"enum": "x"}, "enum must be a list"),
        ({"properties": []}, "properties must be an object"),
        ({"properties": {"a": {"minimum": "1"}}}, "properties.a: minimum must be a number"),
        ({"properties": {"a": 1}}, "properties.a must be an object"),
        ({"items": {"maxItems": True}}, "items: maxItems must be a whole number"),
        ({"anyOf": [{}, {"pattern": 3}]}, "anyOf[1]: pattern must be a string"),
        ({"$defs": {"x": {"allOf": {}}}}, "$defs.x: allOf must be a list"),
    ],
)
def test_schemas(schema: Any, problem: str) -> None:
    (found,) = SchemaRules().problems(schema)
    assert problem in found


def test_a_schema_of_great_depth() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"items": schema}
    (found,) = SchemaRules().problems(schema)
    assert "deeper than" in found


def test_no_more_schemas_are_looked_at_than_the_event_loop_has_time_for() -> None:
    many = Tool(name="f", parameters=json.dumps({"anyOf": [{} for _ in range(5000)]}))
    assert not violations_of(tools=(many,))
    found = violations_of(tools=(many, replace(many, name="g"), replace(many, name="h")))
    assert list(found) == ["tools[1].parameters"]
    assert "more than 8192 schemas" in found["tools[1].parameters"]


def test_schemas_that_are_right() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "c": True},
        "additionalProperties": False,
        "$defs": {"b": {"oneOf": [{"const": None}, {"type": "number", "minimum": 1.5}], "description": "x"}},
    }
    assert list(SchemaRules().problems(schema)) == []


def test_parsers_by_flag() -> None:
    choice = ParserChoice(
        tool=read_tool_parsers(["hermes", "a=mistral", "b=none", "c=auto"]),
        reasoning=read_reasoning_parsers(["none", "a=deepseek_r1"]),
    )
    template = "[TOOL_CALLS] </think>"
    assert [choice.tool_parser(model, template) for model in "abcd"] == ["mistral", "", "mistral", "hermes"]
    assert [choice.reasoning_parser(model, template) for model in "ab"] == ["deepseek_r1", ""]
    assert ParserChoice().reasoning_parser("a", template) == "qwen3"
    with pytest.raises(ValueError, match="is none of auto, none, hermes"):
        read_tool_parsers(["a=gpt"])


def test_parsers_of_twinstage_serve_reach_the_router() -> None:
    flags = ClusterFlags(tool_parser=["hermes", "a=none"], reasoning_parser=["qwen3"]).config(EngineFlags())
    settings = read_settings(RouterSettings, ["--workers", "127.0.0.1:1", *flags.router_flags])
    assert settings.parsers() == ParserChoice(tool={"": "hermes", "a": "none"}, reasoning={"": "qwen3"})
    with pytest.raises(ConfigError, match="is none of auto, none, qwen3"):
        read_settings(RouterSettings, ["--reasoning-parser", "gpt"])
