"""Admission of inputs to embed: they become token ids within the model's limit, or an error that says all."""

from __future__ import annotations

from dataclasses import dataclass

from router.limits import MAX_INPUTS
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import RawEncodeRequest, TextPrompt, TokenPrompt, Truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedInput:
    """One input. The worker scales the vector unless it has to be cut first: then the router does."""

    token_ids: tuple[int, ...]
    normalize: bool
    dimensions: int | None  # numbers to keep; None keeps all

    @property
    def worker_normalizes(self) -> bool:
        return self.normalize and self.dimensions is None


def input_limit(model: ServedModel) -> int:
    """Tokens of the longest input, special tokens included."""
    own = model.tokenizer.bundle.max_input_tokens
    limit = model.description.max_model_len
    return limit if own is None else min(own, limit)


def admit_inputs(raw: RawEncodeRequest, model: ServedModel) -> list[AdmittedInput]:
    """Check, tokenize and truncate. Runs in a thread. Raises InvalidRequest with all violations."""
    violations = Violations()
    violations.check_request_id(raw.request_id)
    _check_options(violations, raw, model)
    if not raw.inputs:
        violations.add(raw.inputs_field, "must not be empty")
    if len(raw.inputs) > MAX_INPUTS:
        violations.add(raw.inputs_field, f"must have at most {MAX_INPUTS} entries, has {len(raw.inputs)}")
    violations.raise_any()
    whole = raw.dimensions is None or raw.dimensions == model.description.embedding_dimensions
    inputs: list[AdmittedInput] = []
    wrong = 0
    for index, entry in enumerate(raw.inputs):
        token_ids, error_path, error = admit_input(entry, raw.truncation, model)
        if error and wrong < MAX_LISTED_PER_FIELD:
            violations.add(_path(raw, index) + ("" if raw.inputs_field == "texts" else error_path), error)
            wrong += 1
        inputs.append(
            AdmittedInput(
                token_ids=tuple(token_ids), normalize=raw.normalize, dimensions=None if whole else raw.dimensions
            )
        )
    violations.raise_any()
    return inputs


def _check_options(violations: Violations, raw: RawEncodeRequest, model: ServedModel) -> None:
    violations.check_number("dimensions", raw.dimensions, low=1, high=model.description.embedding_dimensions)
    violations.check_number("truncation.tokens", raw.truncation.tokens, low=1, high=input_limit(model))


def _path(raw: RawEncodeRequest, index: int) -> str:
    """The path of an input; a stream's request has one, without an index."""
    return raw.inputs_field if raw.inputs_field == "input" else f"{raw.inputs_field}[{index}]"


def admit_input(
    entry: TextPrompt | TokenPrompt | None, truncation: Truncation, model: ServedModel
) -> tuple[list[int], str, str]:
    """Token ids, or the path within the input and the words of what is wrong."""
    if entry is None:
        return [], "", "is required: give text or token_ids"
    limit = input_limit(model)
    cut_to = limit if truncation.to_model_limit else truncation.tokens
    if isinstance(entry, TextPrompt):
        if cut_to is not None:
            entry = _shortened(entry, cut_to, keep_last=truncation.keep_last, tokenizer=model.tokenizer)
        elif len(entry.text) > limit * model.tokenizer.longest_token_characters:
            size = f"has {len(entry.text)} characters, more than the model's limit of {limit} tokens can hold"
            return [], ".text", f"{size}; shorten it or set truncation"
    if isinstance(entry, TokenPrompt):
        path, error = ".token_ids.ids", _wrong_ids(entry, model)
        token_ids = list(entry.token_ids)
    else:
        path, error = ".text", "" if entry.text else "must not be empty"
        token_ids = model.tokenizer.encode(entry.text) if entry.text else []
    if error:
        return [], path, error
    if cut_to is not None and len(token_ids) > cut_to:
        token_ids = _cut(entry, token_ids, cut_to, truncation=truncation, tokenizer=model.tokenizer)
    if len(token_ids) > limit:
        return [], path, f"has {len(token_ids)} tokens, the model's limit is {limit}; shorten it or set truncation"
    return (token_ids, path, "") if token_ids else ([], path, "gives no tokens")


def _wrong_ids(entry: TokenPrompt, model: ServedModel) -> str:
    vocab_size = model.description.vocab_size
    if not entry.token_ids:
        return "must not be empty"
    if max(entry.token_ids) >= vocab_size:
        return f"each id must be below the vocabulary's size {vocab_size}, one is {max(entry.token_ids)}"
    return ""


def _shortened(entry: TextPrompt, max_tokens: int, *, keep_last: bool, tokenizer: TextTokenizer) -> TextPrompt:
    """So much of the text as gives more than `max_tokens` tokens: to tokenize the rest takes long, for nothing.

    One token more than is kept, as the one at which the text is cut may be another than in the whole text.
    """
    num_characters = (max_tokens + 1) * tokenizer.longest_token_characters
    if len(entry.text) <= num_characters:
        return entry
    return TextPrompt(text=entry.text[-num_characters:] if keep_last else entry.text[:num_characters])


def _cut(
    entry: TextPrompt | TokenPrompt,
    token_ids: list[int],
    limit: int,
    *,
    truncation: Truncation,
    tokenizer: TextTokenizer,
) -> list[int]:
    """At most `limit` tokens. Text keeps its special tokens where there is room for them; ids are cut as they are."""
    if isinstance(entry, TextPrompt):
        token_ids = tokenizer.encode_truncated(entry.text, max_tokens=limit, keep_last=truncation.keep_last)
    return token_ids[-limit:] if truncation.keep_last else token_ids[:limit]
