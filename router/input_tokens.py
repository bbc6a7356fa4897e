"""Inputs of pooling models to the token ids that are computed: within the model's limit, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.worker_entry import ServedModel
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import TextPrompt, TokenPrompt, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class RawInput:
    """One input as a caller gives it. `prompt` is put before a text."""

    entry: TextPrompt | TokenPrompt | None
    truncation: Truncation
    prompt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedInput:
    """Token ids, or none and the words of what is wrong; `path` leads to it within the input."""

    token_ids: Sequence[int] = ()
    path: str = ""
    error: str = ""


def input_limit(model: ServedModel) -> int:
    """Tokens of the longest input, special tokens included."""
    own = model.tokenizer.bundle.max_input_tokens
    limit = model.description.max_model_len
    return limit if own is None else min(own, limit)


def tokenize_inputs(inputs: Sequence[RawInput], model: ServedModel) -> list[TokenizedInput]:
    """One for each input, in order. Texts are tokenized together, which all cores share."""
    ready = [_ready(given, model) for given in inputs]
    of_texts = iter(model.tokenizer.encode_many([entry.text for entry in ready if isinstance(entry, TextPrompt)]))
    results: list[TokenizedInput] = []
    for given, entry in zip(inputs, ready, strict=True):
        if not isinstance(entry, TokenizedInput):
            token_ids = next(of_texts) if isinstance(entry, TextPrompt) else entry.token_ids
            entry = _within_limit(given, entry, token_ids, model)
        results.append(entry)
    return results


def too_many_characters(text: str, model: ServedModel) -> str:
    """What is wrong with a text that cannot fit, whatever its tokens are: it need not be tokenized. Empty: nothing."""
    limit = input_limit(model)
    if len(text) <= limit * model.tokenizer.longest_token_characters:
        return ""
    size = f"has {len(text)} characters, more than the model's limit of {limit} tokens can hold"
    return f"{size}; shorten it or set truncation"


def shortened(entry: TextPrompt, max_tokens: int, *, keep_last: bool, tokenizer: TextTokenizer) -> TextPrompt:
    """So much of the text as gives more than `max_tokens` tokens: to tokenize the rest takes long, for nothing.

    One token more than is kept, as the one at which the text is cut may be another than in the whole text.
    """
    num_characters = (max_tokens + 1) * tokenizer.longest_token_characters
    if len(entry.text) <= num_characters:
        return entry
    return TextPrompt(text=entry.text[-num_characters:] if keep_last else entry.text[:num_characters])


def _cut_to(truncation: Truncation, model: ServedModel) -> int | None:
    return input_limit(model) if truncation.to_model_limit else truncation.tokens


def _ready(given: RawInput, model: ServedModel) -> TextPrompt | TokenPrompt | TokenizedInput:
    """The text to tokenize, or ids that need none of it; or what is wrong with either."""
    entry, cut_to = given.entry, _cut_to(given.truncation, model)
    if entry is None:
        return TokenizedInput(error="is required: give text or token_ids")
    if isinstance(entry, TokenPrompt):
        error = _wrong_ids(entry, model)
        return TokenizedInput(path=".token_ids.ids", error=error) if error else entry
    if not entry.text:
        return TokenizedInput(path=".text", error="must not be empty")
    if cut_to is not None:
        entry = shortened(entry, cut_to, keep_last=given.truncation.keep_last, tokenizer=model.tokenizer)
    elif error := too_many_characters(entry.text, model):
        return TokenizedInput(path=".text", error=error)
    return TextPrompt(text=given.prompt + entry.text)


def _within_limit(
    given: RawInput, entry: TextPrompt | TokenPrompt, token_ids: Sequence[int], model: ServedModel
) -> TokenizedInput:
    """The ids, cut where the caller asks for it."""
    limit, cut_to = input_limit(model), _cut_to(given.truncation, model)
    path = ".text" if isinstance(entry, TextPrompt) else ".token_ids.ids"
    if cut_to is not None and len(token_ids) > cut_to:
        token_ids = _cut(given, entry, token_ids, cut_to, model.tokenizer)
    if len(token_ids) > limit:
        words = f"has {len(token_ids)} tokens, the model's limit is {limit}; shorten it or set truncation"
        return TokenizedInput(path=path, error=words)
    return TokenizedInput(token_ids=token_ids, path=path, error="" if token_ids else "gives no tokens")


def _wrong_ids(entry: TokenPrompt, model: ServedModel) -> str:
    vocab_size = model.description.vocab_size
    if not entry.token_ids:
        return "must not be empty"
    if max(entry.token_ids) >= vocab_size:
        return f"each id must be below the vocabulary's size {vocab_size}, one is {max(entry.token_ids)}"
    return ""


def _cut(
    given: RawInput,
    entry: TextPrompt | TokenPrompt,
    token_ids: Sequence[int],
    limit: int,
    tokenizer: TextTokenizer,
) -> Sequence[int]:
    """At most `limit` tokens. Text keeps its special tokens where there is room for them; ids are cut as they are.

    The prompt stays where the beginning of a text is cut, if anything of the text does.
    """
    keep_last = given.truncation.keep_last
    if isinstance(entry, TextPrompt):
        prompt_tokens = tokenizer.prompt_tokens(given.prompt) if keep_last else 0
        if 0 < prompt_tokens < limit - tokenizer.num_special_tokens:
            return [*token_ids[:prompt_tokens], *token_ids[prompt_tokens - limit :]]
        token_ids = tokenizer.encode_truncated(entry.text, max_tokens=limit, keep_last=keep_last)
    return token_ids[-limit:] if keep_last else token_ids[:limit]
