"""From what a client asked for to what can be compiled: who compiles it, and which tokens end the reasoning."""

from __future__ import annotations

from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.grammar.shape import is_ebnf
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import (
    Constraint,
    ConstraintForm,
    GrammarBackend,
    OutputConstraint,
    RawReasoning,
    RawStructuredOutput,
)


def resolve_constraint(
    raw: RawStructuredOutput, tokenizer: TextTokenizer, *, default_backend: GrammarBackend | None = None
) -> OutputConstraint:
    """The constraint, every default resolved; `raw` has passed `shape_violations`.

    `default_backend` is for constraints that name none; None chooses by the form. Raises InvalidRequest for a marker
    that is no special token.
    """
    if raw.reasoning is None:
        return OutputConstraint(answer=_constraint(raw, default_backend))
    inner = raw.reasoning.constraint
    return OutputConstraint(
        answer=_constraint(raw, default_backend),
        reasoning_end_ids=_marker_ids(raw.reasoning, tokenizer),
        reasoning=_constraint(inner, default_backend) if inner is not None else None,
    )


def _constraint(raw: RawStructuredOutput, default: GrammarBackend | None) -> Constraint:
    assert raw.form is not None
    backend = raw.backend or _choose_backend(raw.form, raw.text, default)
    return Constraint(backend=backend, form=raw.form, text=raw.text, choices=raw.choices)


def _choose_backend(form: ConstraintForm, text: str, default: GrammarBackend | None) -> GrammarBackend:
    """The default where it reads the form. Without one, llguidance, which has limits and names what it does not support
    of JSON schema; and xgrammar for what is its own, EBNF and structural tags.
    """
    if form is ConstraintForm.STRUCTURAL_TAG:
        return GrammarBackend.XGRAMMAR
    if default is not None:
        return default
    takes_ebnf = form is ConstraintForm.GRAMMAR and is_ebnf(text)
    return GrammarBackend.XGRAMMAR if takes_ebnf else GrammarBackend.LLGUIDANCE


def _marker_ids(reasoning: RawReasoning, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The marker's token ids. Only an added token's spelling gives the same id wherever it stands in a text."""
    token_ids = tokenizer.encode(reasoning.end, add_special_tokens=False)
    if not token_ids or not tokenizer.added_token_ids.issuperset(token_ids):
        description = f"{reasoning.end!r} is no special token of this model: name the marker that ends its reasoning"
        raise InvalidRequest([FieldViolation("structured_output.reasoning.end", description)])
    return tuple(token_ids)
