"""Chat templates of model families: the same prompt as Transformers makes, and answers that are read back.

The texts are described in data/chat_templates/README.md.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from twinstage.errors import InvalidRequest
from twinstage.text.answers.joining import MessageJoiner
from twinstage.text.answers.parser import AnswerParser
from twinstage.text.answers.reasoning import REASONING_STYLES
from twinstage.text.answers.registry import detect_reasoning_parser, detect_tool_parser, special_tokens_of
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import render_chat
from twinstage.text.stream import TextStream
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import (
    AnswerFormat,
    ChatMessage,
    ChatPrompt,
    Finish,
    FinishReason,
    ProducedToken,
    RequestId,
    TextOptions,
    TokenChunk,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
)

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "data" / "chat_templates").glob("*.jinja"))
}
# The parsers of tools and of reasoning that each of them needs.
PARSERS = {
    "command_r7b": ("command_a", "command_a"),
    "deepseek_r1_distill": ("deepseek_v3", "deepseek_r1"),
    "deepseek_v3.1": ("deepseek_v3", "deepseek_r1"),
    "gemma_2": ("", ""),
    "glm_4.7": ("glm45", "qwen3"),
    "gpt_oss": ("gpt_oss", ""),
    "granite_3.3": ("granite", "qwen3"),
    "granite_4.0": ("hermes", ""),
    "llama_3": ("llama3_json", ""),
    "mistral_nemo": ("mistral", ""),
    "mistral_small_3.2": ("mistral", ""),
    "phi_3.5": ("", ""),
    "qwen2.5": ("hermes", ""),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_xml", ""),
    "smollm2": ("", ""),
    "smollm3": ("", "qwen3"),
}
# Templates that show the model's own calls; the others leave them out of later prompts.
SHOWING_CALLS = sorted(set(PARSERS) - {"gemma_2", "phi_3.5", "smollm2", "smollm3", "granite_3.3"})
ASKING_FOR_NO_CONTENT = ("deepseek_r1_distill",)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL_VARIABLES = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": 'The "weather" & <b>.', "parameters": PARAMETERS},
    }
]
TOOLS = (Tool(name="get_weather", description='The "weather" & <b>.', parameters=json.dumps(PARAMETERS)),)
ARGUMENTS = {"city": "Zürich <1>", "days": 2}
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
USER = {"role": "user", "content": " How is it?\n"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sky": "blue"}', "name": "get_weather", "tool_call_id": "abcdefgh1"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Fine.\n"}, {"role": "user", "content": "日本?"}],
    "called": [USER, CALLING],
    "answered": [USER, CALLING, RESULT],
    "goes on": [USER, CALLING, RESULT, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Ah."}],
    "reasoned": [
        USER,
        {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm.\nWell."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Because."},
    ],
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    """A token for each byte and for each control token of the template; alone, it would put a token before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = re.findall(r"<[|｜][^<>]{1,40}[|｜]>|\[[A-Z_]{3,20}\]|<(?:start|end)_of_turn>", TEMPLATES[family])
    tokenizer.add_special_tokens(["<s>", "</s>", *dict.fromkeys(found)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def bundle_of(family: str) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=tokenizer_of(family).to_str(), chat_template=TEMPLATES[family], special_tokens=SPECIAL_TOKENS
    )


def reference_of(family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(family), chat_template=TEMPLATES[family], **SPECIAL_TOKENS
    )


def message_of(entry: dict[str, Any]) -> ChatMessage:
    calls = tuple(
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))
        for call in entry.get("tool_calls", ())
    )
    return ChatMessage(
        role=entry["role"],
        content=entry["content"] or "",
        tool_calls=calls,
        tool_call_id=entry.get("tool_call_id", ""),
        reasoning=entry.get("reasoning_content", ""),
    )


def conversation_of(family: str, name: str) -> list[dict[str, Any]]:
    """As Transformers gets it: some templates expect no content beside calls."""
    entries = CONVERSATIONS[name]
    if family in ASKING_FOR_NO_CONTENT:
        return [{**entry, "content": None} if entry is CALLING else entry for entry in entries]
    return entries


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("has_tools", [False, True])
def test_prompts_are_those_of_transformers(family: str, has_tools: bool) -> None:
    """Text and token ids, of every conversation, or both refuse it."""
    reference, bundle = reference_of(family), bundle_of(family)
    tokenizer = TextTokenizer(bundle)
    for name in CONVERSATIONS:
        entries = conversation_of(family, name)
        for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
            prompt = ChatPrompt(messages=tuple(map(message_of, entries)), tools=TOOLS if has_tools else (), **options)
            arguments = {"tools": TOOL_VARIABLES if has_tools else None, **options}
            try:
                if family in ASKING_FOR_NO_CONTENT:  # apply_chat_template leaves out what is None
                    template = _compile_jinja_template(TEMPLATES[family])
                    expected = template.render(messages=entries, **arguments, **SPECIAL_TOKENS)
                else:
                    expected = reference.apply_chat_template(entries, tokenize=False, **arguments)
            except (TemplateError, TypeError):
                with pytest.raises(InvalidRequest):
                    render_chat(bundle, prompt)
                continue
            text = render_chat(bundle, prompt)
            assert text == expected, name
            ids = reference(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_message_is_continued_as_transformers_does(family: str) -> None:
    entries = [*CONVERSATIONS["turns"][:1], {"role": "assistant", "content": "It is"}]
    expected = reference_of(family).apply_chat_template(entries, tokenize=False, continue_final_message=True)
    prompt = ChatPrompt(messages=tuple(map(message_of, entries)), continue_final_message=True)
    assert render_chat(bundle_of(family), prompt) == expected
    assert expected.endswith("It is")


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_parsers_of_a_model_are_found(family: str) -> None:
    template = TEMPLATES[family]
    assert (detect_tool_parser(template), detect_reasoning_parser(template)) == PARSERS[family]


def test_no_template_no_parser() -> None:
    assert detect_tool_parser(None) == detect_reasoning_parser(None) == ""


@pytest.mark.parametrize("family", SHOWING_CALLS)
def test_a_call_is_read_as_the_template_writes_it(family: str) -> None:
    """What the template makes of a call is what the model would have written: through tokens and back to the call."""
    bundle = bundle_of(family)
    tokenizer = TextTokenizer(bundle)
    asked = ChatPrompt(messages=(message_of(USER),), tools=TOOLS)
    called = ChatPrompt(messages=(message_of(USER), message_of(CALLING)), tools=TOOLS, add_generation_prompt=False)
    prompt, whole = render_chat(bundle, asked), render_chat(bundle, called)
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    tool_parser, reasoning_parser = PARSERS[family]
    format = AnswerFormat(
        tool_parser=tool_parser,
        tools=TOOLS,
        reasoning_parser=reasoning_parser,
        starts_in_reasoning=bool(reasoning_parser)
        and REASONING_STYLES[reasoning_parser].is_open_at_end(whole[:shared]),
    )
    token_ids = tokenizer.encode(whole[shared:], add_special_tokens=False)
    stream = TextStream(tokenizer, TextOptions(kept_special_tokens=special_tokens_of(format)))
    tokens = tuple(ProducedToken(token_id=token_id) for token_id in token_ids)
    finish = Finish(reason=FinishReason.STOP)
    delta = stream.push(TokenChunk(request_id=RequestId("r"), tokens=tokens, finish=finish))
    parser, joiner = AnswerParser(format), MessageJoiner()
    joiner.add_delta(parser.push(delta.text))
    rest, ended = parser.finish(finish)
    joiner.add_delta(rest)
    (call,) = joiner.message().tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    assert ended.reason is FinishReason.TOOL_CALLS


def test_a_model_that_may_call_no_tool_sees_none() -> None:
    none = ToolChoice(mode=ToolChoiceMode.NONE)
    messages = (message_of(USER),)
    without = render_chat(bundle_of("qwen3"), ChatPrompt(messages=messages))
    assert render_chat(bundle_of("qwen3"), ChatPrompt(messages=messages, tools=TOOLS, tool_choice=none)) == without


def test_reasoning_effort_reaches_the_template() -> None:
    messages = (message_of(USER),)
    qwen = render_chat(bundle_of("qwen3"), ChatPrompt(messages=messages, reasoning_effort="none"))
    assert qwen.endswith("<think>\n\n</think>\n\n")
    deepseek = render_chat(bundle_of("deepseek_v3.1"), ChatPrompt(messages=messages, reasoning_effort="low"))
    assert deepseek.endswith("<think>")
    shown = ChatPrompt(messages=messages, chat_template="{{ reasoning_effort }}", reasoning_effort="low")
    assert render_chat(bundle_of("qwen3"), shown) == "low"
    kept = ChatPrompt(messages=messages, chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert not render_chat(bundle_of("qwen3"), kept).endswith("</think>\n\n")


@pytest.mark.parametrize(
    "written", ["{{ c.arguments }}", "{{ '' + c.arguments }}", "{{ c.arguments + '' }}", "{{ c.arguments | tojson }}"]
)
def test_arguments_can_be_read_as_an_object_and_as_text(written: str) -> None:
    template = "{% set c = messages[0].tool_calls[0].function %}" + written + "{{ c.arguments.days }}"
    prompt = ChatPrompt(messages=(message_of(CALLING),), chat_template=template)
    assert render_chat(bundle_of("qwen3"), prompt) == json.dumps(ARGUMENTS, ensure_ascii=False) + "2"


def test_calls_are_not_continued() -> None:
    prompt = ChatPrompt(messages=(message_of(USER), message_of(CALLING)), continue_final_message=True)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render_chat(bundle_of("qwen3"), prompt)
