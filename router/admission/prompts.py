"""From prompts to token ids that fit the model's context."""

from __future__ import annotations

from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest, Unimplemented
from twinstage.text.chat_template import render_chat
from twinstage.types import BatchPrompt, ChatPrompt, Prompt, RawStopping, TextPrompt, TokenPrompt


def tokenize(prompt: Prompt, model: ServedModel) -> tuple[int, ...]:
    """The prompt's token ids. Runs in a thread: long prompts and templates take their time."""
    match prompt:
        case TextPrompt():
            check_characters(prompt, prompt.text, model)
            return tuple(model.tokenizer.encode(prompt.text))
        case TokenPrompt():
            return prompt.token_ids
        case ChatPrompt():
            return tokenize_rendered(prompt, render_chat(model.tokenizer.bundle, prompt), model)
        case BatchPrompt():
            raise Unimplemented("this version does not implement batch")


def tokenize_rendered(prompt: ChatPrompt, text: str, model: ServedModel) -> tuple[int, ...]:
    check_characters(prompt, text, model)
    # The template has written the special tokens already.
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def check_characters(prompt: Prompt, text: str, model: ServedModel) -> None:
    """Refuse what would take long to tokenize only to be too long. Raises InvalidRequest."""
    limit = model.description.max_model_len
    if len(text) > limit * model.tokenizer.longest_token_characters:
        description = f"prompt 0 has {len(text)} characters, more than the model's limit of {limit} tokens can hold"
        raise InvalidRequest([FieldViolation(field_of(prompt), description)])


def field_of(prompt: Prompt) -> str:
    """The path by which a client knows its prompt."""
    match prompt:
        case TextPrompt():
            return "prompt"
        case TokenPrompt():
            return "prompt_token_ids.ids"
        case ChatPrompt():
            return "messages"
        case BatchPrompt():
            return "batch.prompts"


def check_length(field: str, length: int, *, stopping: RawStopping, limit: int) -> None:
    """The prompt and what the request insists on generating fit the model's context. Raises InvalidRequest."""
    if length == 0:
        raise InvalidRequest([FieldViolation(field, "gives no tokens")])
    needed = max(1, stopping.min_tokens or 0)
    if stopping.max_tokens is not None:
        needed = max(needed, stopping.max_tokens)
    if length + needed <= limit:
        return
    asked = f"{needed} generated tokens" if needed > 1 else "the one token to generate"
    raise InvalidRequest(
        [FieldViolation(field, f"prompt 0 has {length} tokens, which with {asked} exceed the model's limit of {limit}")]
    )
