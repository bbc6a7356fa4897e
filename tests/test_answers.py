"""Answers as typed parts: each family's way of calling tools and of reasoning, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstage.text.answers.joining import MessageJoiner
from twinstage.text.answers.parser import AnswerParser, new_call_id
from twinstage.text.answers.reasoning import REASONING_STYLES
from twinstage.text.answers.registry import TOOL_PARSERS, WHOLE_ANSWER_PARSERS, special_tokens_of
from twinstage.types import AnswerFormat, Finish, FinishReason, Tool

WEATHER = Tool(
    name="get_weather",
    description="The weather of a city.",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "detailed": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        }
    ),
)
NOW = Tool(name="now")
TOOLS = (WEATHER, NOW)
END = Finish(reason=FinishReason.STOP, matched_token_id=2)


@dataclass(frozen=True)
class Answer:
    """What became of a text."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    reason: FinishReason


def read(text: str, format: AnswerFormat, cuts: tuple[int, ...] = (), finish: Finish = END) -> Answer:
    """Read a text that comes in pieces, cut at `cuts`."""
    numbers = itertools.count()
    parser = AnswerParser(format, new_id=lambda: f"id{next(numbers)}")
    joiner = MessageJoiner()
    borders = [0, *sorted(cuts), len(text)]
    for start, end in itertools.pairwise(borders):
        joiner.add_delta(parser.push(text[start:end]))
    rest, ended = parser.finish(finish)
    joiner.add_delta(rest)
    message = joiner.message()
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(calls)
    return Answer(message.content, message.reasoning, calls, ended.reason)


def tools(parser: str, **changes: object) -> AnswerFormat:
    return replace(AnswerFormat(tool_parser=parser, tools=TOOLS), **changes)  # type: ignore[arg-type]


def called(*calls: tuple[str, str], content: str = "", reasoning: str = "") -> Answer:
    return Answer(content, reasoning, calls, FinishReason.TOOL_CALLS)


def said(content: str, reasoning: str = "") -> Answer:
    return Answer(content, reasoning, (), FinishReason.STOP)


PARIS = '{"city": "Paris", "days": 3}'
# One or two calls as each family writes them, with content where the family allows it.
CALLS: dict[str, tuple[str, Answer]] = {
    "hermes": (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        called(("get_weather", PARIS), ("now", "{}"), content="Let me look."),
    ),
    "hermes arguments first": (
        '<tool_call>{"arguments": {"city": "a } b"}, "id": [1, {"x": null}], "name": "get_weather"}</tool_call>',
        called(("get_weather", '{"city": "a } b"}')),
    ),
    "hermes arguments as text": (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Köln\\"}"}</tool_call>',
        called(("get_weather", '{"city": "Köln"}')),
    ),
    "hermes without arguments": ('<tool_call>{"name": "now"}</tool_call>', called(("now", "{}"))),
    "llama3_json": (
        '{"type": "function", "name": "get_weather", "parameters": ' + PARIS + '}; {"name": "now", "parameters": {}}',
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "llama3_json tagged": (
        '<|python_tag|>{"name": "get_weather", "parameters": ' + PARIS + "}",
        called(("get_weather", PARIS)),
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + PARIS + '}, {"name": "now", "arguments": {}}]',
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "mistral named": (
        "Sure.[TOOL_CALLS]get_weather[ARGS]" + PARIS + "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        called(("get_weather", PARIS), ("now", "{}"), content="Sure."),
    ),
    "mistral bare": ("[TOOL_CALLS]get_weather" + PARIS, called(("get_weather", PARIS))),
    "qwen3_xml": (
        "I will.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=detailed>\nTrue\n</parameter>\n<parameter=tags>\n"
        '["a", "<b>"]\n</parameter>\n</function>\n</tool_call>',
        called(("get_weather", '{"city": "42", "days": 3, "detailed": true, "tags": ["a", "<b>"]}'), content="I will."),
    ),
    "qwen3_coder": (
        "<function=now>\n</function>\n<function=get_weather><parameter=city>two\nlines</parameter></function>",
        called(("now", "{}"), ("get_weather", '{"city": "two\\nlines"}')),
    ),
    "pythonic": (
        "[get_weather(city='Paris (F)', days=3, tags=['a', \"b]\"], detailed=true), now()]",
        called(
            ("get_weather", '{"city": "Paris (F)", "days": 3, "tags": ["a", "b]"], "detailed": true}'), ("now", "{}")
        ),
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        + PARIS
        + "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        called(("get_weather", PARIS), ("now", "{}"), content="Let me look.", reasoning="Hm."),
    ),
    "gpt_oss final": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi ",
        said("Hi ", "Hm."),
    ),
    "json_array": (
        ' [{"name": "get_weather", "arguments": ' + PARIS + '}, {"name": "now", "arguments": {}}] ',
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "lfm2": (
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>One moment.',
        called(("get_weather", '{"city": "Paris"}'), content="One moment."),
    ),
    "granite": (
        '<|tool_call|>[{"name": "get_weather", "arguments": ' + PARIS + "}]",
        called(("get_weather", PARIS)),
    ),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "now", "arguments": null}]<|/tool_call|>',
        called(("now", "{}")),
    ),
    "command_a": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + PARIS
        + "}\n]<|END_ACTION|>",
        called(("get_weather", PARIS)),
    ),
    "nemotron_v2": ('<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', called(("now", "{}"))),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + PARIS
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "deepseek_v3 without fences": (
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        + PARIS
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        called(("get_weather", PARIS), content="So."),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        + PARIS
        + "<|tool_call_end|><|tool_calls_section_end|>",
        called(("get_weather", PARIS)),
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        called(("get_weather", PARIS), ("now", "{}")),
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        called(("get_weather", '{"city": "Paris"}')),
    ),
}
# What only looks like calls: all of it is content.
NO_CALLS: dict[str, str] = {
    "hermes": 'Use <tool_call> like this: <tool_call>{name}</tool_call> or <tool_call>{"x": 1}</tool_call>. ',
    "hermes unknown tool": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "hermes not an object": '<tool_call>{"name": "now", "arguments": 5}</tool_call>',
    "hermes cut off": '<tool_call>{"na',
    "llama3_json": '{"name": "Bob", "parameters": 3} is JSON ',
    "llama3_json text": "  {curly} ",
    "json_array": "[1, 2] are numbers",
    "mistral": "[TOOL_CALLS] are announced like [TOOL_CALLS]this[ARGS]{}",
    "qwen3_xml": "<tool_call>\n<function=rm>\n</function>\n</tool_call>\n<function=",
    "pythonic": "[1] now() [now(1)]",
    "pythonic positional": "[now(1)]",
    "pythonic unknown": "[now(), rm()]",
    "pythonic infinite": "[now(x=1e999)]",
    "lfm2": "<|tool_call_start|>[now(",
    "granite": "<|tool_call|>[] ",
    "gpt_oss": "plain text ",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rm\n```json\n{}\n```",
    "kimi_k2": "<|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}",
    "glm45": "<tool_call>rm</tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="rm"></invoke>',
}


@pytest.mark.parametrize("case", CALLS)
def test_each_family_calls_tools(case: str) -> None:
    text, expected = CALLS[case]
    format = tools(case.split()[0])
    assert read(text, format) == expected
    assert read(text, format, tuple(range(len(text)))) == expected
    for _, arguments in expected.calls:
        json.loads(arguments)


def test_every_parser_is_tried() -> None:
    assert {case.split()[0] for case in CALLS} == set(TOOL_PARSERS)


@pytest.mark.parametrize("case", NO_CALLS)
def test_what_is_no_call_is_content(case: str) -> None:
    text = NO_CALLS[case]
    assert read(text, tools(case.split()[0])) == said(text)


def test_arguments_come_as_they_are_written() -> None:
    """A call is announced as soon as its name is known, and its arguments follow piece by piece."""
    parser = AnswerParser(tools("hermes"))
    (begun,) = parser.push('<tool_call>{"name": "get_weather", "arguments": {"ci').tool_calls
    assert (begun.index, begun.name, begun.arguments) == (0, "get_weather", '{"ci')
    assert begun.id.startswith("call_")
    (more,) = parser.push('ty": "Par').tool_calls
    assert (more.index, more.id, more.name, more.arguments) == (0, "", "", 'ty": "Par')


def test_a_call_that_is_cut_off_is_not_complete() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'
    length = Finish(reason=FinishReason.LENGTH)
    assert read(text, tools("hermes"), finish=length) == Answer(
        "", "", (("get_weather", '{"city": "Par'),), FinishReason.LENGTH
    )
    assert read(text, tools("hermes")).reason is FinishReason.STOP
    whole = text + 'is"}}</tool_call>'
    assert read(whole, tools("hermes"), finish=length).reason is FinishReason.LENGTH


def test_what_stands_behind_broken_arguments_is_content() -> None:
    broken = read('<tool_call>{"name": "now", "arguments": {"a": ]} </tool_call> Sorry.', tools("hermes"))
    assert broken.calls == (("now", '{"a": '),)
    assert broken.content == "]} </tool_call> Sorry."
    assert broken.reason is FinishReason.STOP


def test_one_call_where_one_is_asked_for() -> None:
    text, expected = CALLS["hermes"]
    answer = read(text, tools("hermes", parallel_tool_calls=False))
    assert answer == replace(expected, calls=expected.calls[:1])


THOUGHT = "Paris?\nYes."
REASONING = [
    ("qwen3", False, "<think>\nParis?\nYes.\n</think>\n\nHi ", said("Hi ", THOUGHT)),
    ("qwen3", False, " Hi <think>", said(" Hi <think>")),
    ("qwen3", True, "Paris?\nYes.\n</think>\n\nHi", said("Hi", THOUGHT)),
    ("qwen3", True, "<think>Paris?\nYes.</think>Hi", said("Hi", THOUGHT)),
    ("qwen3", False, "<think>\n\n</think>\n\nHi", said("Hi")),
    ("qwen3", True, "Paris?\nYes. </thi", said("", "Paris?\nYes. </thi")),
    ("deepseek_r1", True, "Paris?\nYes.", said("", THOUGHT)),
    ("mistral", False, "[THINK]Paris?\nYes.[/THINK]Hi", said("Hi", THOUGHT)),
    ("granite", False, "Here is my thought process: Paris?\nYes.\nHere is my response: Hi", said("Hi", THOUGHT)),
    ("command_a", False, "<|START_THINKING|>Paris?\nYes.<|END_THINKING|>Hi", said("Hi", THOUGHT)),
    ("seed_oss", False, "<seed:think>Paris?\nYes.</seed:think>Hi", said("Hi", THOUGHT)),
    ("kimi", False, "◁think▷Paris?\nYes.◁/think▷Hi", said("Hi", THOUGHT)),
    ("gemma4", False, "<|channel>thought\nParis?\nYes.<channel|>Hi", said("Hi", THOUGHT)),
]


@pytest.mark.parametrize(("parser", "starts_inside", "text", "expected"), REASONING)
def test_reasoning(parser: str, starts_inside: bool, text: str, expected: Answer) -> None:
    format = AnswerFormat(reasoning_parser=parser, starts_in_reasoning=starts_inside)
    assert read(text, format) == expected
    assert read(text, format, tuple(range(len(text)))) == expected


def test_reasoning_and_calls() -> None:
    text = "Hm, <tool_call>?</think>\n\n" + CALLS["hermes"][0]
    format = tools("hermes", reasoning_parser="qwen3", starts_in_reasoning=True)
    assert read(text, format) == replace(CALLS["hermes"][1], reasoning="Hm, <tool_call>?")


def test_where_reasoning_begins() -> None:
    qwen = REASONING_STYLES["qwen3"]
    assert qwen.is_open_at_end("<|im_start|>assistant\n<think>\n")
    assert not qwen.is_open_at_end("what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not qwen.is_open_at_end("<think>\n\n</think>\n\n")
    assert qwen.is_open_in("<think>\nFirst, ")
    assert not qwen.is_open_in("<think>x</think>The")


def test_ids() -> None:
    ids = {new_call_id("hermes") for _ in range(100)}
    assert len(ids) == 100
    mistral = {new_call_id("mistral") for _ in range(100)}
    assert len(mistral) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() and call_id.isascii() for call_id in mistral)
    (call,) = AnswerParser(tools("kimi_k2")).push(CALLS["kimi_k2"][0]).tool_calls
    assert call.id == "functions.get_weather:0"  # its template takes the model's own ids
    first, second = AnswerParser(tools("kimi_k2")).push(2 * CALLS["kimi_k2"][0]).tool_calls  # it counted anew
    assert first.id == call.id
    assert second.id not in ("", call.id)


def test_tokens_that_parsers_must_see() -> None:
    assert "[TOOL_CALLS]" in special_tokens_of(tools("mistral"))
    assert "[/THINK]" in special_tokens_of(AnswerFormat(reasoning_parser="mistral"))


# --- any split gives the same ---------------------------------------------------------------------

_NOISE = ["\n", " ", "{", "}", "[", '"', "\\", ",", "<", "<tool", "</think>", "<think>", "word", "é", '"name"', ": 1"]


def _texts(parser: str) -> st.SearchStrategy[str]:
    """Texts made of calls of this family, whole, cut short and with characters changed, and of noise."""
    own = [text for case, (text, _) in CALLS.items() if case.split()[0] == parser]
    own += [text for case, text in NO_CALLS.items() if case.split()[0] == parser]
    whole = st.sampled_from(own)
    part = whole.flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[:at]))
    end = whole.flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[at:]))
    pieces = st.lists(st.one_of(whole, part, end, st.sampled_from(_NOISE)), max_size=5)
    return pieces.map("".join)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), parser=st.sampled_from(sorted(TOOL_PARSERS)))
def test_any_split_gives_the_same(data: st.DataObject, parser: str) -> None:
    text = data.draw(_texts(parser))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    format = tools(
        parser,
        reasoning_parser=data.draw(st.sampled_from(["", "qwen3", "deepseek_r1"])),
        starts_in_reasoning=data.draw(st.booleans()),
        parallel_tool_calls=data.draw(st.booleans()),
    )
    whole = read(text, format)
    assert read(text, format, tuple(cuts)) == whole
    assert read(text, format, tuple(range(len(text)))) == whole
    if not whole.calls and not format.reasoning_parser and parser not in WHOLE_ANSWER_PARSERS:
        assert whole.content == text


@pytest.mark.parametrize(
    ("parser", "piece"),
    [("hermes", "<tool_call>{"), ("hermes", '<tool_call>{"a": "'), ("pythonic", "[now("), ("qwen3_xml", "<function=n")],
)
def test_a_hostile_text_takes_no_long_time(parser: str, piece: str) -> None:
    """Twice the text takes about twice the time, not four times: the router's event loop does this work."""

    def seconds(count: int) -> float:
        reader, text = AnswerParser(tools(parser)), piece * count
        started_s = time.thread_time()
        for start in range(0, len(text), 4):
            reader.push(text[start : start + 4])
        reader.finish(END)
        return time.thread_time() - started_s

    assert min(seconds(2000) for _ in range(2)) < 12 * min(seconds(500) for _ in range(2)) + 0.05
