"""Which parsers there are, and which of them a model needs."""

from __future__ import annotations

from twinstage.text.answers.calls import ToolParser
from twinstage.text.answers.channels import ChannelMessages
from twinstage.text.answers.json_calls import (
    ArrayCalls,
    CommandCalls,
    GraniteCalls,
    HermesCalls,
    JsonCalls,
    LlamaCalls,
    NemotronCalls,
)
from twinstage.text.answers.named_calls import DeepSeekCalls, KimiCalls, MistralCalls
from twinstage.text.answers.python_calls import LiquidCalls, PythonCalls
from twinstage.text.answers.reasoning import REASONING_STYLES
from twinstage.text.answers.xml_calls import GlmCalls, MiniMaxCalls, QwenXmlCalls, SeedCalls
from twinstage.types import AnswerFormat

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
    "qwen3_xml": QwenXmlCalls,
    "qwen3_coder": QwenXmlCalls,
    "pythonic": PythonCalls,
    "lfm2": LiquidCalls,
    "granite": GraniteCalls,
    "phi4_mini_json": GraniteCalls,
    "command_a": CommandCalls,
    "deepseek_v3": DeepSeekCalls,
    "kimi_k2": KimiCalls,
    "nemotron_v2": NemotronCalls,
    "glm45": GlmCalls,
    "minimax_m2": MiniMaxCalls,
    "seed_oss": SeedCalls,
    "json_array": ArrayCalls,
    "gpt_oss": ChannelMessages,
}
# Parsers that find reasoning and content, too, so that they read answers without tools as well.
WHOLE_ANSWER_PARSERS = frozenset({"gpt_oss"})

# What a chat template must hold; the first that fits is taken.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>analysis<|message|>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_xml", ("<tool_call>", "<function=")),
    ("granite", ("<|tool_call|>",)),
    ("nemotron_v2", ("<TOOLCALL>",)),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("command_a", ("<|START_ACTION|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("pythonic", ("tools", "[func_name1(params_name1=params_value1")),
    ("llama3_json", ("tools", "ipython", '"parameters": ')),
)
_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("command_a", ("<|START_THINKING|>",)),
    ("gemma4", ("<|channel>",)),
    ("kimi", ("◁think▷",)),
    ("granite", ("Here is my thought process:",)),
    ("deepseek_r1", ("<｜Assistant｜><think>",)),
    ("qwen3", ("</think>",)),
)


def detect_tool_parser(chat_template: str | None) -> str:
    """The parser for models of this template; empty when it shows no tools in a way that is known."""
    return _first_fit(_TOOL_SIGNS, chat_template)


def detect_reasoning_parser(chat_template: str | None) -> str:
    """The parser for models of this template; empty when it knows of no reasoning."""
    return _first_fit(_REASONING_SIGNS, chat_template)


def special_tokens_of(format: AnswerFormat | None) -> frozenset[str]:
    """Spellings of tokens that the parsers of a format must see, special or not."""
    tokens: set[str] = set()
    if format is None:
        return frozenset()
    if format.tool_parser:
        parser = TOOL_PARSERS[format.tool_parser]
        tokens.update(parser.markers, parser.other_tokens, parser.ends if issubclass(parser, JsonCalls) else ())
    if format.reasoning_parser:
        tokens |= REASONING_STYLES[format.reasoning_parser].special_tokens
    return frozenset(tokens)


def _first_fit(signs: tuple[tuple[str, tuple[str, ...]], ...], chat_template: str | None) -> str:
    if not chat_template:
        return ""
    return next((name for name, needed in signs if all(sign in chat_template for sign in needed)), "")
