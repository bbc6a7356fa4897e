"""What is refused of a constraint at a glance, and what the router makes of the rest."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fake_workers import make_bundle
from router.service.door import Door
from twinstage.errors import InvalidRequest
from twinstage.grammar.resolve import resolve_constraint
from twinstage.grammar.shape import MAX_NESTING, nesting, shape_violations
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import ConstraintForm, GrammarBackend, RawReasoning
from twinstage.types.constraints import RawStructuredOutput as Raw
from twinstage.v1 import common_pb2, generation_pb2

SCHEMA = '{"type": "object"}'


def deep_schema(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        (Raw(form=None), "structured_output", "exactly one of json_schema, json_object"),
        (Raw.json_schema(""), "structured_output.json_schema", "must not be empty"),
        (Raw.json_schema("{"), "structured_output.json_schema", "is no JSON"),
        (Raw.json_schema("[1]"), "structured_output.json_schema", "JSON object"),
        (Raw.json_schema("true"), "structured_output.json_schema", "give a schema"),
        (Raw.json_schema(deep_schema(MAX_NESTING + 1)), "structured_output.json_schema", "must not nest"),
        (Raw.json_schema("[" * 100_000), "structured_output.json_schema", "must not nest"),
        (Raw.structural_tag("7"), "structured_output.structural_tag", "JSON object"),
        (Raw.regex(""), "structured_output.regex", "must not be empty"),
        (Raw.regex("a" * 16_385), "structured_output.regex", "16384 characters, has 16385"),
        (Raw.regex("(" * 65 + "a" + ")" * 65), "structured_output.regex", "must not nest"),
        (Raw.grammar("s" * 65_537), "structured_output.grammar", "65536 characters"),
        (Raw.grammar("root ::= " + "(" * 65 + '"a"' + ")" * 65), "structured_output.grammar", "must not nest"),
        (Raw.choice([]), "structured_output.choice", "must not be empty"),
        (Raw.choice(["a", ""]), "structured_output.choice", "values[1]"),
        (Raw.choice(["a"] * 1025), "structured_output.choice", "1024 entries, has 1025"),
        (
            Raw.structural_tag("{}", backend=GrammarBackend.LLGUIDANCE),
            "structured_output.backend",
            "llguidance has no structural_tag",
        ),
        (Raw.regex("a", reasoning=RawReasoning(end="")), "structured_output.reasoning.end", "1 to 64 characters"),
        (
            Raw.regex("a", reasoning=RawReasoning(constraint=Raw.regex(""))),
            "structured_output.reasoning.constraint.regex",
            "must not be empty",
        ),
        (
            Raw.regex("a", reasoning=RawReasoning(constraint=Raw.regex("b", reasoning=RawReasoning()))),
            "structured_output.reasoning.constraint.reasoning",
            "leave it out",
        ),
    ],
)
def test_what_is_wrong_is_named(raw: Raw, field: str, words: str) -> None:
    (violation,) = shape_violations(raw)
    assert violation.field == field
    assert words in violation.description


@pytest.mark.parametrize(
    "raw",
    [
        Raw.json_schema(SCHEMA),
        Raw.json_schema(deep_schema(MAX_NESTING)),
        Raw.json_schema({"const": "[[[[" * 100}),
        Raw.json_object(),
        Raw.regex("[((((]" * 100 + r"\(" * 100),
        Raw.choice(["a", "b"]),
        Raw.grammar('root ::= "' + "(" * 100 + '"'),
        Raw.structural_tag({"type": "structural_tag"}),
    ],
)
def test_what_may_be_right_passes(raw: Raw) -> None:
    assert not list(shape_violations(raw))


def test_nesting_is_counted_in_a_time_that_the_size_bounds() -> None:
    started_s = time.thread_time()
    for form, text in (
        (ConstraintForm.JSON_SCHEMA, '"' * 200_001 + "[" * 50_000),
        (ConstraintForm.REGEX, "[" * 8_000 + "(" * 8_000),
        (ConstraintForm.GRAMMAR, '"\\' * 30_000),
    ):
        nesting(text, form)
    assert time.thread_time() - started_s < 2


@pytest.mark.parametrize(
    ("raw", "default", "backend"),
    [
        (Raw.json_schema(SCHEMA), None, GrammarBackend.LLGUIDANCE),
        (Raw.json_schema(SCHEMA), GrammarBackend.XGRAMMAR, GrammarBackend.XGRAMMAR),
        (
            Raw.json_schema(SCHEMA, backend=GrammarBackend.LLGUIDANCE),
            GrammarBackend.XGRAMMAR,
            GrammarBackend.LLGUIDANCE,
        ),
        (Raw.grammar('root ::= "a"'), None, GrammarBackend.XGRAMMAR),
        (Raw.grammar('root ::= "a"'), GrammarBackend.LLGUIDANCE, GrammarBackend.LLGUIDANCE),
        (Raw.grammar('start: "a"'), GrammarBackend.XGRAMMAR, GrammarBackend.XGRAMMAR),
        (Raw.grammar('start: "a"'), None, GrammarBackend.LLGUIDANCE),
        (Raw.structural_tag("{}"), GrammarBackend.LLGUIDANCE, GrammarBackend.XGRAMMAR),
    ],
)
def test_who_compiles_it(raw: Raw, default: GrammarBackend | None, backend: GrammarBackend) -> None:
    constraint = resolve_constraint(raw, TextTokenizer(make_bundle()), default_backend=default)
    assert constraint.answer.backend is backend
    assert constraint.reasoning_end_ids == ()


def test_a_marker_is_a_special_token() -> None:
    tokenizer = TextTokenizer(make_bundle())
    marked = Raw.regex("a", reasoning=RawReasoning(end="<eos>", constraint=Raw.regex("b")))
    constraint = resolve_constraint(marked, tokenizer)
    assert constraint.reasoning_end_ids == (256,)
    assert constraint.reasoning is not None
    assert constraint.reasoning.text == "b"
    with pytest.raises(InvalidRequest, match="no special token") as caught:
        resolve_constraint(Raw.regex("a", reasoning=RawReasoning()), tokenizer)
    assert [violation.field for violation in caught.value.violations] == ["structured_output.reasoning.end"]


def test_mappings_are_written_as_json() -> None:
    assert json.loads(Raw.json_schema({"enum": ["ä"]}).text) == {"enum": ["ä"]}


def test_a_backend_that_nobody_knows_is_refused_and_not_replaced() -> None:
    unknown: Any = 99
    inner = common_pb2.StructuredOutput(regex="a", backend=unknown)
    reasoning = common_pb2.ReasoningConstraint(constraint=inner)
    output = common_pb2.StructuredOutput(regex="a", backend=unknown, reasoning=reasoning)
    door = Door(trusts_chat_templates=False)
    with pytest.raises(InvalidRequest) as caught:
        door.check_generate(generation_pb2.GenerateRequest(structured_output=output))
    assert [violation.field for violation in caught.value.violations] == [
        "structured_output.backend",
        "structured_output.reasoning.constraint.backend",
    ]
    for backend in common_pb2.GrammarBackend.values():
        known = common_pb2.StructuredOutput(regex="a", backend=backend)
        door.check_generate(generation_pb2.GenerateRequest(structured_output=known))
