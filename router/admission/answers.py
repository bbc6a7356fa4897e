"""How the answers of each model are read: which parsers find its reasoning and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.admission.forced_calls import must_call
from router.worker_entry import ServedModel
from twinstage.text.answers.reasoning import REASONING_STYLES
from twinstage.text.answers.registry import (
    TOOL_PARSERS,
    WHOLE_ANSWER_PARSERS,
    detect_reasoning_parser,
    detect_tool_parser,
)
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import AnswerFormat, ChatPrompt, Prompt, Tool, ToolChoiceMode
from twinstage.types.constraints import OutputConstraint

FORCED_CALLS = "json_array"  # what a grammar holds any model to
AUTO, NONE = "auto", "none"
_TAIL_TOKENS = 32  # of the prompt, in which a start tag would stand


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserChoice:
    """Parsers by name of the model; `""` is for all that are not named. `auto` goes by the chat template."""

    tool: Mapping[str, str] = field(default_factory=dict)
    reasoning: Mapping[str, str] = field(default_factory=dict)

    def tool_parser(self, model: str, chat_template: str | None) -> str:
        """The name of a parser, or empty."""
        return _chosen(self.tool, model, detect_tool_parser(chat_template))

    def reasoning_parser(self, model: str, chat_template: str | None) -> str:
        """The name of a parser, or empty."""
        return _chosen(self.reasoning, model, detect_reasoning_parser(chat_template))


def _chosen(choices: Mapping[str, str], model: str, detected: str) -> str:
    chosen = choices.get(model) or choices.get("") or AUTO
    return detected if chosen == AUTO else "" if chosen == NONE else chosen


def read_parser_flag(values: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Parsers by model from PARSER and MODEL=PARSER. Raises ValueError."""
    choices: dict[str, str] = {}
    for value in values:
        model, _, parser = value.rpartition("=")
        if parser not in (AUTO, NONE, *known):
            raise ValueError(f"{parser!r} is none of {', '.join((AUTO, NONE, *known))}")
        choices[model] = parser
    return choices


def read_tool_parsers(values: Sequence[str]) -> dict[str, str]:
    """Of --tool-parser. Raises ValueError."""
    return read_parser_flag(values, list(TOOL_PARSERS))


def read_reasoning_parsers(values: Sequence[str]) -> dict[str, str]:
    """Of --reasoning-parser. Raises ValueError."""
    return read_parser_flag(values, list(REASONING_STYLES))


def answer_format(
    prompt: Prompt, model: ServedModel, parsers: ParserChoice, *, token_ids: Sequence[int]
) -> AnswerFormat | None:
    """How the answer to a conversation is read, or None when all of it is content, as of other prompts.

    `prompt` has no `tool_problem`.
    """
    if not isinstance(prompt, ChatPrompt):
        return None
    reasoning_parser = parsers.reasoning_parser(model.name, _template(prompt, model))
    tool_parser, tools = _tool_parser(prompt, model, parsers), _callable_tools(prompt)
    if not tools and tool_parser not in WHOLE_ANSWER_PARSERS:
        tool_parser = ""
    if not tool_parser and not reasoning_parser:
        return None
    return AnswerFormat(
        tool_parser=tool_parser,
        tools=tools,
        parallel_tool_calls=prompt.parallel_tool_calls is not False,
        reasoning_parser=reasoning_parser,
        starts_in_reasoning=bool(reasoning_parser) and _starts_in_reasoning(reasoning_parser, prompt, model, token_ids),
    )


def tool_problem(prompt: ChatPrompt, model: ServedModel, parsers: ParserChoice) -> str:
    """Why nobody would know the calls of an answer when they came; empty when somebody does, or none can come.

    Of a model's own template this is what its capability TOOLS tells.
    """
    if not _callable_tools(prompt) or _tool_parser(prompt, model, parsers):
        return ""
    return (
        f"the chat template of {model.name!r} shows no way of calling tools that is known; start the router with "
        "--tool-parser, or leave tools out"
    )


def _tool_parser(prompt: ChatPrompt, model: ServedModel, parsers: ParserChoice) -> str:
    return FORCED_CALLS if must_call(prompt) else parsers.tool_parser(model.name, _template(prompt, model))


def _callable_tools(prompt: ChatPrompt) -> tuple[Tool, ...]:
    choice = prompt.tool_choice
    return () if choice is not None and choice.mode is ToolChoiceMode.NONE else prompt.tools


def _template(prompt: ChatPrompt, model: ServedModel) -> str | None:
    return prompt.chat_template or model.tokenizer.bundle.chat_template


def behind_reasoning(
    constraint: OutputConstraint, answer: AnswerFormat, tokenizer: TextTokenizer
) -> tuple[OutputConstraint, AnswerFormat]:
    """Where the prompt ends within reasoning, the grammar is for what follows it, unless the request says otherwise.

    The marker that ends it must be a token of its own; else there is no reasoning: the answer begins at once.
    """
    if not answer.starts_in_reasoning or constraint.reasoning_end_ids:
        return constraint, answer
    end_ids = tokenizer.encode(REASONING_STYLES[answer.reasoning_parser].end, add_special_tokens=False)
    if end_ids and tokenizer.added_token_ids.issuperset(end_ids):
        return replace(constraint, reasoning_end_ids=tuple(end_ids)), answer
    return constraint, replace(answer, reasoning_parser="", starts_in_reasoning=False)


def _starts_in_reasoning(parser: str, prompt: ChatPrompt, model: ServedModel, token_ids: Sequence[int]) -> bool:
    style = REASONING_STYLES[parser]
    if prompt.continue_final_message or prompt.chat_template_kwargs.get("continue_final_message"):
        return style.is_open_in(prompt.messages[-1].content)
    tail = model.tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    return style.is_open_at_end(tail)
