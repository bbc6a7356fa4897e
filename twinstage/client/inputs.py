"""What a caller may give for a prompt, a conversation or texts, and what it stands for.

A text is a sequence of texts to Python, of its characters: where several are asked for, one stands for itself. Raises
TypeError for what stands for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from twinstage.types import (
    BatchPrompt,
    ChatMessage,
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    ToolChoiceMode,
)

OnePrompt = str | TextPrompt | TokenPrompt | Sequence[int]
GenerationInput = OnePrompt | BatchPrompt | Sequence[str | TextPrompt | TokenPrompt]
ChatInput = str | ChatMessage | Sequence[ChatMessage | Mapping[str, Any]] | ChatPrompt
ToolChoiceInput = ToolChoice | str | None

_MODES = (ToolChoiceMode.AUTO, ToolChoiceMode.NONE, ToolChoiceMode.REQUIRED)


def texts_of(given: str | Sequence[str]) -> Sequence[str]:
    return (given,) if isinstance(given, str) else given


def prompt_of(given: GenerationInput) -> TextPrompt | TokenPrompt | BatchPrompt:
    """A list is a batch of prompts, or the token ids of one."""
    if isinstance(given, BatchPrompt):
        return given
    if _is_list(given) and not all(isinstance(entry, int) for entry in given):
        return BatchPrompt(prompts=tuple(one_prompt(entry) for entry in given))
    return one_prompt(given)


def one_prompt(given: Any) -> TextPrompt | TokenPrompt:
    if isinstance(given, TextPrompt | TokenPrompt):
        return given
    if isinstance(given, str):
        return TextPrompt(text=given)
    if _is_list(given) and all(isinstance(entry, int) for entry in given):
        return TokenPrompt(token_ids=tuple(given))
    raise TypeError(f"a prompt is a text, a list of token ids, or a list of prompts, and no {type(given).__name__}")


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def conversation_of(given: ChatInput) -> ChatPrompt:
    """A text is one message of the user; a message may be a mapping of the fields of `ChatMessage`."""
    if isinstance(given, ChatPrompt):
        return given
    if isinstance(given, str):
        given = ChatMessage(role="user", content=given)
    return ChatPrompt(messages=(given,) if isinstance(given, ChatMessage) else tuple(map(_message_of, given)))


def _message_of(given: Any) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    if isinstance(given, Mapping):
        return ChatMessage(**given)
    raise TypeError(f"a message is a ChatMessage or a mapping of its fields, and no {type(given).__name__}")


def tool_choice_of(given: ToolChoice | str) -> ToolChoice:
    """A word is one of the modes that need no more than themselves."""
    if isinstance(given, ToolChoice):
        return given
    for mode in _MODES:
        if given == mode.value:
            return ToolChoice(mode=mode)
    raise TypeError(f"a tool choice is auto, none, required, or a ToolChoice of a tool's name, and not {given!r}")
