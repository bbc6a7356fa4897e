"""What an output must look like: the values of structured output, from what a client sent to what workers obey.

    RawStructuredOutput   what a client sent
    OutputConstraint      judged by the router: each part has a backend that is known to compile it

"Grammar" is the general word here; a JSON schema, a regular expression and a list of choices are ways to write one.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_REASONING_END = "</think>"  # of Qwen3, DeepSeek-R1 and most others


class ConstraintForm(enum.Enum):
    """How a grammar is written; the values are the names of the public API's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class GrammarBackend(enum.Enum):
    """The library that compiles a grammar."""

    XGRAMMAR = "xgrammar"
    LLGUIDANCE = "llguidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawStructuredOutput:
    """A constraint as a client sent it. `form` is None when none was given; `backend` None leaves it to the router.

    `text` is the schema, expression, grammar or tag; `choices` are the allowed outputs of CHOICE. The static methods
    make one of each form.
    """

    form: ConstraintForm | None
    text: str = ""
    choices: tuple[str, ...] = ()
    backend: GrammarBackend | None = None
    reasoning: RawReasoning | None = None

    @staticmethod
    def json_schema(schema: str | Mapping[str, Any], **more: Any) -> RawStructuredOutput:
        """JSON that satisfies a schema, given as JSON text or as a mapping."""
        return RawStructuredOutput(form=ConstraintForm.JSON_SCHEMA, text=_json_text(schema), **more)

    @staticmethod
    def json_object(**more: Any) -> RawStructuredOutput:
        """Any JSON object."""
        return RawStructuredOutput(form=ConstraintForm.JSON_OBJECT, **more)

    @staticmethod
    def regex(expression: str, **more: Any) -> RawStructuredOutput:
        """A text that the whole of a regular expression matches."""
        return RawStructuredOutput(form=ConstraintForm.REGEX, text=expression, **more)

    @staticmethod
    def choice(choices: Sequence[str], **more: Any) -> RawStructuredOutput:
        """One of some texts."""
        return RawStructuredOutput(form=ConstraintForm.CHOICE, choices=tuple(choices), **more)

    @staticmethod
    def grammar(text: str, **more: Any) -> RawStructuredOutput:
        """A context-free grammar, in EBNF (GBNF, `root ::= ...`) or as Lark writes it (`start: ...`)."""
        return RawStructuredOutput(form=ConstraintForm.GRAMMAR, text=text, **more)

    @staticmethod
    def structural_tag(tag: str | Mapping[str, Any], **more: Any) -> RawStructuredOutput:
        """Free text with structured parts, given as JSON text or as a mapping."""
        return RawStructuredOutput(form=ConstraintForm.STRUCTURAL_TAG, text=_json_text(tag), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReasoning:
    """The output begins with reasoning up to `end`, and only what follows obeys the constraint; as a client sent it.

    `constraint` is that of the reasoning itself; None leaves it free.
    """

    end: str = DEFAULT_REASONING_END
    constraint: RawStructuredOutput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar and the backend that compiles it."""

    backend: GrammarBackend
    form: ConstraintForm
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """What the output of a sequence obeys: `answer`, from its first token on.

    With `reasoning_end_ids`, which are the tokens of a marker, it does so after the marker; what comes before that
    obeys `reasoning`, or is free.
    """

    answer: Constraint
    reasoning_end_ids: tuple[int, ...] = ()
    reasoning: Constraint | None = None


def _json_text(document: str | Mapping[str, Any]) -> str:
    return document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
