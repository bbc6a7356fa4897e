"""A tool choice that forces calls: the grammar that it stands for, and real workers that are held to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from fake_workers import make_bundle
from harness import ProcessCluster
from router.admission.answers import behind_reasoning
from router.admission.forced_calls import schema_of_calls, with_forced_calls
from twinstage.client import ChatMessage, Options, Sampling, Stopping, Tool, ToolChoice, ToolChoiceMode, TwinstageClient
from twinstage.client import StructuredOutput as Structured
from twinstage.errors import InvalidRequest
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import AnswerFormat, ChatPrompt, FinishReason, RawGenerationRequest
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend, OutputConstraint

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER = Tool(name="get_weather", parameters=json.dumps(PARAMETERS))
NOW = Tool(name="now")
TOOLS = (WEATHER, NOW)
REQUIRED = ToolChoice(mode=ToolChoiceMode.REQUIRED)
NAMED = ToolChoice(mode=ToolChoiceMode.NAMED, function="get_weather")


def test_the_schema_of_a_named_tool() -> None:
    schema = schema_of_calls(TOOLS, NAMED, parallel=True)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"]["properties"] == {"name": {"const": "get_weather"}, "arguments": {"$ref": "#/$defs/tool0"}}
    assert schema["$defs"]["tool0"]["properties"]["city"] == {"$ref": "#/$defs/tool0/$defs/city"}


def test_the_schema_of_any_tool() -> None:
    schema = schema_of_calls(TOOLS, REQUIRED, parallel=True)
    assert "maxItems" not in schema
    assert schema_of_calls(TOOLS, REQUIRED, parallel=False)["maxItems"] == 1
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["get_weather", "now"]
    assert schema["$defs"]["tool1"]["additionalProperties"] is False


RECURSIVE = {
    "$id": "https://example.org/node",
    "properties": {
        "kind": {"enum": ["leaf", {"$ref": "#"}]},
        "same": {"$ref": "#/properties/kind"},
        "left": {"$ref": "#"},
        "right": {"$ref": "https://example.org/node#"},
        "$ref": {"type": "null"},
    },
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "obeys"),
    [
        ('{"kind": "leaf", "same": "leaf", "left": {"kind": "leaf", "$ref": null}}', True),
        ('{"kind": {"$ref": "#"}, "right": {"kind": "leaf"}}', True),
        ('{"kind": "leaf", "same": 1}', False),
        ('{"kind": "leaf", "left": [{"name": "f", "arguments": {"kind": "leaf"}}]}', False),
        ('{"kind": "leaf", "right": {"left": {}}}', False),
        ("5", False),
    ],
)
def test_references_within_a_tool_s_schema_stay_within_it(arguments: str, obeys: bool) -> None:
    tools = (NOW, Tool(name="f", parameters=json.dumps(RECURSIVE)))
    schema = json.dumps(schema_of_calls(tools, REQUIRED, parallel=True))
    constraint = Constraint(form=ConstraintForm.JSON_SCHEMA, text=schema, backend=GrammarBackend.LLGUIDANCE)
    matcher = CompiledGrammars(make_bundle()).start_now(OutputConstraint(answer=constraint))
    call = TextTokenizer(make_bundle()).encode('[{"name": "f", "arguments": ' + arguments + "}]")
    assert all(map(matcher.accept, call)) is obeys


def request(tool: Tool, choice: ToolChoice | None) -> RawGenerationRequest:
    messages = (ChatMessage(role="user", content="?"),)
    return RawGenerationRequest(prompt=ChatPrompt(messages=messages, tools=(tool,), tool_choice=choice))


def test_who_must_not_call_is_left_alone() -> None:
    for choice in (None, ToolChoice(), ToolChoice(mode=ToolChoiceMode.NONE)):
        assert with_forced_calls(request(WEATHER, choice)) == request(WEATHER, choice)


def test_tools_of_which_no_grammar_can_be_made_are_named() -> None:
    schema: dict[str, object] = {}
    for _ in range(62):
        schema = {"type": "array", "items": schema}
    deep = Tool(name="f", parameters=json.dumps({"type": "object", "properties": {"a": schema}}))
    with pytest.raises(InvalidRequest) as caught:
        with_forced_calls(request(deep, REQUIRED))
    assert [violation.field for violation in caught.value.violations] == ["tools"]


def test_calls_are_forced_behind_reasoning() -> None:
    grammar = Constraint(backend=GrammarBackend.LLGUIDANCE, form=ConstraintForm.JSON_SCHEMA, text="{}")
    constraint, tokenizer = OutputConstraint(answer=grammar), TextTokenizer(make_bundle())
    answer = AnswerFormat(tool_parser="json_array", reasoning_parser="qwen3")
    assert behind_reasoning(constraint, answer, tokenizer) == (constraint, answer)
    thinking = replace(answer, starts_in_reasoning=True)
    with_marker = Tokenizer.from_str(tokenizer.bundle.tokenizer_json)
    with_marker.add_tokens(["</think>"])
    marked = TextTokenizer(replace(tokenizer.bundle, tokenizer_json=with_marker.to_str()))
    delayed = replace(constraint, reasoning_end_ids=(257,))
    assert behind_reasoning(constraint, thinking, marked) == (delayed, thinking)
    asked = replace(constraint, reasoning_end_ids=(9,))
    assert behind_reasoning(asked, thinking, marked) == (asked, thinking)
    # Its marker is no token of this tokenizer, so that nobody could tell when it has ended.
    assert behind_reasoning(constraint, thinking, tokenizer) == (constraint, replace(answer, reasoning_parser=""))


# --- real workers ---------------------------------------------------------------------------------

pytestmark = pytest.mark.xdist_group("tiny")


@pytest.fixture(scope="module")
def client(tiny_cluster: ProcessCluster) -> Iterator[TwinstageClient]:
    with TwinstageClient(tiny_cluster.address) as client:
        yield client
    tiny_cluster.wait_idle()


@pytest.mark.parametrize("choice", [NAMED, REQUIRED])
def test_a_model_that_knows_nothing_calls_tools(client: TwinstageClient, choice: ToolChoice) -> None:
    """Random weights, whose template shows no tools: all that they say right is what the grammar demands."""
    options = Options(sampling=Sampling(seed=5, temperature=1.5), stopping=Stopping(max_tokens=300), timeout_s=60)
    prompt = ChatPrompt(
        messages=(ChatMessage(role="user", content="Weather?"),), tools=TOOLS, parallel_tool_calls=False
    )
    answer = client.chat(prompt, options, tool_choice=choice)
    (call,) = answer.message.tool_calls
    assert answer.text == ""
    assert answer.results[0].finish.reason is FinishReason.TOOL_CALLS
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        assert arguments["city"] in ("Paris", "Rome")
        assert arguments["days"] in range(10)
    else:
        assert (choice, call.name, arguments) == (REQUIRED, "now", {})
    with client.chat_stream(prompt, options, tool_choice=choice) as stream:
        assert list(stream)[-1].finish == answer.results[0].finish
    (streamed,) = stream.message().tool_calls
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)


def test_refusals(client: TwinstageClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("?", Options(structured_output=Structured.json_object()), tools=TOOLS, tool_choice="required")
    assert [violation.field for violation in caught.value.violations] == ["structured_output"]
    unsupported = Tool(
        name="f", parameters='{"type": "object", "properties": {"a": {"pattern": "(?=a)b", "type": "string"}}}'
    )
    with pytest.raises(InvalidRequest) as caught:
        client.chat("?", tools=[unsupported], tool_choice="required")
    assert [violation.field for violation in caught.value.violations] == ["tools"]
