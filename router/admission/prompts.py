"""From prompts to token ids that fit the model's context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.violations import MAX_LISTED_PER_FIELD
from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.text.chat_template import render_chat
from twinstage.types import BatchPrompt, ChatPrompt, Prompt, RawStopping, TextPrompt, TokenPrompt


def tokenize_all(prompt: Prompt, model: ServedModel) -> list[tuple[int, ...]]:
    """The token ids of each prompt. Runs in a thread: long prompts and templates take their time.

    Raises InvalidRequest, for a batch with all prompts that are too long to be tokenized.
    """
    if not isinstance(prompt, BatchPrompt):
        return [tokenize(prompt, model)]
    too_long = (
        FieldViolation(path, _too_many_characters(index, len(entry.text), model))
        for index, (path, entry) in enumerate(zip(fields_of(prompt), prompt.prompts, strict=True))
        if isinstance(entry, TextPrompt) and _has_too_many(entry.text, model)
    )
    _raise_any(too_long)
    return [tokenize(entry, model) for entry in prompt.prompts]


def tokenize(prompt: TextPrompt | TokenPrompt | ChatPrompt, model: ServedModel) -> tuple[int, ...]:
    """The token ids of one prompt. Raises InvalidRequest."""
    match prompt:
        case TextPrompt():
            check_characters(prompt, prompt.text, model)
            return tuple(model.tokenizer.encode(prompt.text))
        case TokenPrompt():
            return prompt.token_ids
        case ChatPrompt():
            return tokenize_rendered(prompt, render_chat(model.tokenizer.bundle, prompt), model)


def tokenize_rendered(prompt: ChatPrompt, text: str, model: ServedModel) -> tuple[int, ...]:
    """The token ids of a conversation that is text already. Raises InvalidRequest."""
    check_characters(prompt, text, model)
    # The template has written the special tokens already.
    return tuple(model.tokenizer.encode(text, add_special_tokens=False))


def check_characters(prompt: TextPrompt | ChatPrompt, text: str, model: ServedModel) -> None:
    """Refuse what would take long to tokenize only to be too long. Raises InvalidRequest."""
    if _has_too_many(text, model):
        (path,) = fields_of(prompt)
        raise InvalidRequest([FieldViolation(path, _too_many_characters(0, len(text), model))])


def _has_too_many(text: str, model: ServedModel) -> bool:
    return len(text) > model.description.max_model_len * model.tokenizer.longest_token_characters


def _too_many_characters(index: int, count: int, model: ServedModel) -> str:
    limit = model.description.max_model_len
    return f"prompt {index} has {count} characters, more than the model's limit of {limit} tokens can hold"


def fields_of(prompt: Prompt) -> list[str]:
    """The paths by which a client knows its prompts."""
    match prompt:
        case TextPrompt():
            return ["prompt"]
        case TokenPrompt():
            return ["prompt_token_ids.ids"]
        case ChatPrompt():
            return ["messages"]
        case BatchPrompt():
            return [f"batch.prompts[{index}].{fields_of(entry)[0]}" for index, entry in enumerate(prompt.prompts)]


def check_lengths(prompt: Prompt, prompts: Sequence[Sequence[int]], *, stopping: RawStopping, limit: int) -> None:
    """Each prompt and what the request insists on generating fit the model's context.

    `prompts` are the token ids. Raises InvalidRequest with all that do not fit.
    """
    needed = max(1, stopping.min_tokens or 0)
    if stopping.max_tokens is not None:
        needed = max(needed, stopping.max_tokens)
    if all(0 < len(token_ids) <= limit - needed for token_ids in prompts):
        return
    asked = f"{needed} generated tokens" if needed > 1 else "the one token to generate"
    wrong = []
    for index, (path, token_ids) in enumerate(zip(fields_of(prompt), prompts, strict=True)):
        length = len(token_ids)
        if length == 0:
            wrong.append(FieldViolation(path, "gives no tokens"))
        elif length + needed > limit:
            excess = f"prompt {index} has {length} tokens, which with {asked} exceed the model's limit of {limit}"
            wrong.append(FieldViolation(path, excess))
    _raise_any(wrong)


def _raise_any(violations: Iterable[FieldViolation]) -> None:
    """Raise InvalidRequest with the first of them, as many as one error has room for."""
    if found := list(violations):
        raise InvalidRequest(found[:MAX_LISTED_PER_FIELD])
