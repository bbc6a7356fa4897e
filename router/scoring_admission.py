"""Admission of pairs to score: they become token ids within the model's limit, or an error that says all.

An embedding model gets each text by itself, with its prompt for queries or for documents where it has one; a scoring
model gets each pair as one input.
"""

from __future__ import annotations

from router.embedding_admission import AdmittedInput, prompt_text, unpooled_tokens
from router.input_tokens import RawInput, input_limit, shortened, tokenize_inputs, too_many_characters
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.text.score_template import tokenize_pair
from twinstage.types import PoolingTask, RawScoreRequest, TextPrompt

# Names under which sentence-transformers looks for the prompts of either side; the first that there is counts.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def admit_texts(raw: RawScoreRequest, model: ServedModel) -> list[AdmittedInput]:
    """Check, tokenize and truncate all queries, then all documents. Runs in a thread. Raises InvalidRequest.

    Without documents there is nothing to compute, and no input.
    """
    violations = _checked(raw, model)
    queries = _admit_all(violations, raw.query_field, raw.queries, raw, model, _QUERY_PROMPTS)
    documents = _admit_all(violations, "documents", raw.documents, raw, model, _DOCUMENT_PROMPTS)
    violations.raise_any()
    return [*queries, *documents] if documents else []


def admit_pairs(raw: RawScoreRequest, model: ServedModel) -> list[AdmittedInput]:
    """Check, tokenize and truncate all pairs. Runs in a thread. Raises InvalidRequest.

    Truncation takes tokens of the longer text first, from its end; in a template, of the document alone.
    """
    violations = _checked(raw, model)
    _check_texts(violations, raw, model)
    violations.raise_any()
    max_tokens = input_limit(model) if raw.truncation.to_model_limit else raw.truncation.tokens
    inputs: list[AdmittedInput] = []
    wrong = 0
    for index, document in enumerate(raw.documents):
        pair = [raw.queries[index if len(raw.queries) > 1 else 0], document]
        if max_tokens is not None:
            cut = (TextPrompt(text=text) for text in pair)
            pair = [shortened(text, max_tokens, keep_last=False, tokenizer=model.tokenizer).text for text in cut]
        token_ids, token_types = tokenize_pair(model.tokenizer, pair[0], pair[1], max_tokens=max_tokens)
        error = _wrong_length(len(token_ids), max_tokens, input_limit(model))
        if error and wrong < MAX_LISTED_PER_FIELD:
            violations.add(f"documents[{index}]", error)
            wrong += 1
        inputs.append(
            AdmittedInput(
                token_ids=tuple(token_ids),
                token_type_ids=tuple(token_types),
                normalize=False,
                dimensions=None,
                task=PoolingTask.SCORE,
            )
        )
    violations.raise_any()
    return inputs


def _wrong_length(length: int, max_tokens: int | None, limit: int) -> str:
    """What is wrong with a pair of so many tokens; empty: nothing."""
    if not length:
        return "gives no tokens with its query"
    if max_tokens is not None and length > max_tokens:
        return f"leaves {length} tokens with its query when all is cut that can be; {max_tokens} are asked for"
    if length > limit:
        return f"has {length} tokens with its query, the model's limit is {limit}; shorten it or set truncation"
    return ""


def _checked(raw: RawScoreRequest, model: ServedModel) -> Violations:
    violations = Violations()
    violations.check_request_id(raw.request_id)
    violations.check_number("truncation.tokens", raw.truncation.tokens, low=1, high=input_limit(model))
    violations.check_number("top_n", raw.top_n, low=1)
    num_queries, num_documents = len(raw.queries), len(raw.documents)
    if num_queries not in {1, num_documents}:
        violations.add(
            "documents",
            f"has {num_documents} entries, {raw.query_field} has {num_queries}: give one query for all documents, or "
            "as many of each",
        )
    violations.raise_any()
    return violations


def _check_texts(violations: Violations, raw: RawScoreRequest, model: ServedModel) -> None:
    """Neither empty nor longer than any text that fits."""
    is_cut = raw.truncation.to_model_limit or raw.truncation.tokens is not None
    for field, texts in ((raw.query_field, raw.queries), ("documents", raw.documents)):
        wrong = 0
        for index, text in enumerate(texts):
            error = "" if text else "must not be empty"
            error = error or ("" if is_cut else too_many_characters(text, model))
            if error and wrong < MAX_LISTED_PER_FIELD:
                violations.add(_path(field, index), error)
                wrong += 1


def _path(field: str, index: int) -> str:
    return field if field == "query" else f"{field}[{index}]"


def _admit_all(
    violations: Violations,
    field: str,
    texts: tuple[str, ...],
    raw: RawScoreRequest,
    model: ServedModel,
    prompt_names: tuple[str, ...],
) -> list[AdmittedInput]:
    named = next((name for name in prompt_names if name in model.tokenizer.bundle.prompts), None)
    prompt = prompt_text(model, named)
    unpooled = unpooled_tokens(model, prompt)
    normalize = model.tokenizer.bundle.similarity == "cosine"
    inputs: list[AdmittedInput] = []
    wrong = 0
    given = [RawInput(entry=TextPrompt(text=text), truncation=raw.truncation, prompt=prompt) for text in texts]
    for index, tokenized in enumerate(tokenize_inputs(given, model)):
        if tokenized.error and wrong < MAX_LISTED_PER_FIELD:
            violations.add(_path(field, index), tokenized.error)
            wrong += 1
        token_ids = tuple(tokenized.token_ids)
        inputs.append(
            AdmittedInput(token_ids=token_ids, normalize=normalize, dimensions=None, unpooled_tokens=unpooled)
        )
    return inputs
