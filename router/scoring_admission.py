"""Admission of pairs to score: they become token ids within the model's limit, or an error that says all."""

from __future__ import annotations

from router.embedding_admission import AdmittedInput, admit_input, input_limit
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.types import RawScoreRequest, TextPrompt


def admit_texts(raw: RawScoreRequest, model: ServedModel) -> list[AdmittedInput]:
    """Check, tokenize and truncate all queries, then all documents. Runs in a thread. Raises InvalidRequest.

    Without documents there is nothing to compute, and no input.
    """
    violations = Violations()
    violations.check_request_id(raw.request_id)
    violations.check_number("truncation.tokens", raw.truncation.tokens, low=1, high=input_limit(model))
    violations.check_number("top_n", raw.top_n, low=1)
    _check_counts(violations, raw)
    violations.raise_any()
    queries = _admit_all(violations, raw.query_field, raw.queries, raw, model)
    documents = _admit_all(violations, "documents", raw.documents, raw, model)
    violations.raise_any()
    return [*queries, *documents] if documents else []


def _check_counts(violations: Violations, raw: RawScoreRequest) -> None:
    num_queries, num_documents = len(raw.queries), len(raw.documents)
    if num_queries == num_documents or num_queries == 1:
        return
    violations.add(
        "documents",
        f"has {num_documents} entries, {raw.query_field} has {num_queries}: give one query for all documents, or as "
        "many of each",
    )


def _admit_all(
    violations: Violations, field: str, texts: tuple[str, ...], raw: RawScoreRequest, model: ServedModel
) -> list[AdmittedInput]:
    inputs: list[AdmittedInput] = []
    wrong = 0
    for index, text in enumerate(texts):
        token_ids, _, error = admit_input(TextPrompt(text=text), raw.truncation, model)
        if error and wrong < MAX_LISTED_PER_FIELD:
            violations.add(field if field == "query" else f"{field}[{index}]", error)
            wrong += 1
        inputs.append(AdmittedInput(token_ids=tuple(token_ids), normalize=True, dimensions=None))
    return inputs
