"""What is refused of a constraint at a glance, in a time that its size bounds.

The backends recurse into what they read and expand what repeats, so nesting is limited, and so is the size of what
costs more than its length says. What only a compiler can tell is `checking`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from twinstage.errors import FieldViolation
from twinstage.types.constraints import ConstraintForm, GrammarBackend, RawStructuredOutput

MAX_NESTING = 64  # brackets within brackets; a JSON schema takes two for each object within an object
MAX_REGEX_CHARACTERS = 16 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_CHOICES = 1024
MAX_REASONING_END_CHARACTERS = 64

_JSON_FORMS = (ConstraintForm.JSON_SCHEMA, ConstraintForm.STRUCTURAL_TAG)
_MAX_CHARACTERS = {
    ConstraintForm.REGEX: MAX_REGEX_CHARACTERS,
    ConstraintForm.GRAMMAR: MAX_GRAMMAR_CHARACTERS,
}
# What is not closed goes on to the end, so that each pattern looks at a character once.
_JSON_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_REGEX_BRACKETS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)
_GRAMMAR_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\.)*"?|\\.|[()\[\]{}]', re.DOTALL)
_OPENING = frozenset("([{")
_CLOSING = frozenset(")]}")


def shape_violations(raw: RawStructuredOutput, *, path: str = "structured_output") -> Iterator[FieldViolation]:
    """What is wrong with a constraint as far as its shape tells; `path` is its field in the request."""
    if raw.form is None:
        forms = ", ".join(form.value for form in ConstraintForm)
        yield FieldViolation(path, f"needs exactly one of {forms}")
        return
    field = f"{path}.{raw.form.value}"
    wrong = _choice_violation(raw) if raw.form is ConstraintForm.CHOICE else _text_violation(raw)
    if wrong:
        yield FieldViolation(field, wrong)
    if raw.backend is GrammarBackend.LLGUIDANCE and raw.form is ConstraintForm.STRUCTURAL_TAG:
        yield FieldViolation(f"{path}.backend", "llguidance has no structural_tag: take xgrammar, or leave it out")
    if raw.reasoning is not None:
        yield from _reasoning_violations(raw, path=f"{path}.reasoning")


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is EBNF (GBNF) rather than Lark: the former defines by `::=`, which the latter has nowhere."""
    return "::=" in grammar


def _reasoning_violations(raw: RawStructuredOutput, *, path: str) -> Iterator[FieldViolation]:
    assert raw.reasoning is not None
    if not 1 <= len(raw.reasoning.end) <= MAX_REASONING_END_CHARACTERS:
        limit = MAX_REASONING_END_CHARACTERS
        yield FieldViolation(f"{path}.end", f"must have 1 to {limit} characters, has {len(raw.reasoning.end)}")
    inner = raw.reasoning.constraint
    if inner is None:
        return
    if inner.reasoning is not None:
        yield FieldViolation(f"{path}.constraint.reasoning", "reasoning has no reasoning of its own: leave it out")
    else:
        yield from shape_violations(inner, path=f"{path}.constraint")


def _choice_violation(raw: RawStructuredOutput) -> str:
    if not raw.choices:
        return "values must not be empty"
    if len(raw.choices) > MAX_CHOICES:
        return f"values must have at most {MAX_CHOICES} entries, has {len(raw.choices)}"
    if "" in raw.choices:
        return f"values[{raw.choices.index('')}] must not be empty"
    return ""


def _text_violation(raw: RawStructuredOutput) -> str:
    assert raw.form is not None
    if raw.form is ConstraintForm.JSON_OBJECT:
        return ""
    if not raw.text:
        return "must not be empty"
    limit = _MAX_CHARACTERS.get(raw.form)
    if limit is not None and len(raw.text) > limit:
        return f"must have at most {limit} characters, has {len(raw.text)}"
    if nesting(raw.text, raw.form) > MAX_NESTING:
        return f"must not nest more than {MAX_NESTING} brackets"
    return _json_violation(raw.text, raw.form) if raw.form in _JSON_FORMS else ""


def _json_violation(text: str, form: ConstraintForm) -> str:
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"is no JSON: {error}"
    if form is ConstraintForm.JSON_SCHEMA and isinstance(document, bool):
        return "allows everything, or nothing: give a schema"
    return "" if isinstance(document, dict) else "must be a JSON object"


def nesting(text: str, form: ConstraintForm) -> int:
    """How many brackets are open at the same time at most; brackets in strings and escaped ones do not count."""
    pattern = _GRAMMAR_BRACKETS
    if form in _JSON_FORMS:
        pattern = _JSON_BRACKETS
    elif form is ConstraintForm.REGEX:
        pattern = _REGEX_BRACKETS
    depth = deepest = 0
    for match in pattern.finditer(text):
        bracket = match.group()
        if bracket in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in _CLOSING:
            depth = max(0, depth - 1)
    return deepest
