"""Matchers: their masks against what they accept, both backends; reasoning before an answer; taking tokens back."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_workers import make_bundle
from tiny_models import IM_END_ID, IM_START_ID
from twinstage.errors import InvalidRequest
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.grammar.matcher import SequenceMatcher
from twinstage.grammar.xgrammar_schemas import not_heeded
from twinstage.text.bundle import read_bundle
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend, OutputConstraint

EOS = 256
BACKENDS = list(GrammarBackend)
SCHEMA = (
    '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'
)
EBNF = 'root ::= "(" root ")" | [a-c]+'
TAG = (
    '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [{"type": "tag", '
    '"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</f>"}]}}'
)


@cache
def grammars() -> CompiledGrammars:
    return CompiledGrammars(make_bundle(), apart=())


@cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer(make_bundle())


def constraint(form: ConstraintForm, text: str = "", *choices: str, backend: GrammarBackend) -> Constraint:
    return Constraint(backend=backend, form=form, text=text, choices=choices)


def matcher_of(form: ConstraintForm, text: str = "", *choices: str, backend: GrammarBackend) -> SequenceMatcher:
    return grammars().start_now(OutputConstraint(answer=constraint(form, text, *choices, backend=backend)))


def allowed(matcher: SequenceMatcher) -> set[int]:
    return set(np.flatnonzero(matcher.allowed({EOS}, vocab_size=257)).tolist())


def feed(matcher: SequenceMatcher, text: str) -> bool:
    return all(matcher.accept(token_id) for token_id in tokenizer().encode(text))


CASES = [
    *[(backend, ConstraintForm.JSON_SCHEMA, SCHEMA, '{"n": -12}') for backend in BACKENDS],
    *[(backend, ConstraintForm.JSON_OBJECT, "", '{"a": [1, {"b": null}]}') for backend in BACKENDS],
    *[(backend, ConstraintForm.REGEX, "[0-9]{2,3}(-[a-f]+)?", "123-abc") for backend in BACKENDS],
    *[(backend, ConstraintForm.GRAMMAR, EBNF, "((abc))") for backend in BACKENDS],
    (GrammarBackend.LLGUIDANCE, ConstraintForm.GRAMMAR, 'start: "a" start? "b"', "aabb"),
    (GrammarBackend.XGRAMMAR, ConstraintForm.STRUCTURAL_TAG, TAG, "hm <f>true</f> ok"),
]


@pytest.mark.parametrize(("backend", "form", "text", "example"), CASES)
def test_masks_allow_exactly_what_is_accepted(
    backend: GrammarBackend, form: ConstraintForm, text: str, example: str
) -> None:
    """At every place of an example: each token is accepted if and only if the mask allows it."""
    matcher = matcher_of(form, text, backend=backend)
    for token_id in tokenizer().encode(example):
        _check_mask(matcher)
        assert matcher.accept(token_id)
    _check_mask(matcher)
    assert matcher.may_end


def _check_mask(matcher: SequenceMatcher) -> None:
    mask = allowed(matcher)
    assert (EOS in mask) == matcher.may_end
    for token_id in range(256):
        accepted = matcher.accept(token_id)
        assert accepted == (token_id in mask), token_id
        if accepted:
            matcher.rollback(1)
    assert allowed(matcher) == mask, "taking a token back leaves no trace"


@pytest.mark.parametrize("backend", BACKENDS)
def test_choices(backend: GrammarBackend) -> None:
    choices = ("ab", "abc", 'x"y\\', "größer", "\x00\n\x7f\x85\u2028")
    for choice in choices:
        matcher = matcher_of(ConstraintForm.CHOICE, "", *choices, backend=backend)
        assert feed(matcher, choice)
        assert matcher.may_end
        assert matcher.is_over == (choice != "ab")
    assert not feed(matcher_of(ConstraintForm.CHOICE, "", *choices, backend=backend), "ac")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end(backend: GrammarBackend) -> None:
    """Where nothing can follow, the output is over; where something can, it may end."""
    matcher = matcher_of(ConstraintForm.REGEX, "a{1,2}", backend=backend)
    assert not matcher.may_end
    assert feed(matcher, "a")
    assert matcher.may_end
    assert not matcher.is_over
    assert feed(matcher, "a")
    assert matcher.is_over
    assert allowed(matcher) == {EOS}
    assert not matcher.accept(97)
    matcher.rollback(2)
    assert not matcher.may_end


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_go_their_own_ways(backend: GrammarBackend) -> None:
    first = matcher_of(ConstraintForm.REGEX, "(ab|ac)d", backend=backend)
    assert feed(first, "a")
    second = first.copy()
    assert feed(first, "b")
    assert feed(second, "cd")
    assert feed(first, "d")
    second.rollback(3)
    assert feed(second, "abd")


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_walks_can_be_taken_back_and_repeated(backend: GrammarBackend) -> None:
    choose = random.Random(5)
    matcher = matcher_of(ConstraintForm.JSON_OBJECT, backend=backend)
    taken: list[int] = []
    masks: list[set[int]] = []
    for _ in range(60):
        if choose.random() < 0.3 and taken:
            count = choose.randint(1, min(4, len(taken)))
            matcher.rollback(count)
            del taken[-count:], masks[-count:]
        if matcher.is_over:
            matcher.rollback(1)
            del taken[-1:], masks[-1:]
        masks.append(allowed(matcher) - {EOS})
        taken.append(choose.choice(sorted(masks[-1])))
        assert matcher.accept(taken[-1])
    again = matcher_of(ConstraintForm.JSON_OBJECT, backend=backend)
    for token_id, mask in zip(taken, masks, strict=True):
        assert allowed(again) - {EOS} == mask
        assert again.accept(token_id)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ConstraintForm.REGEX, "("),
        (ConstraintForm.REGEX, "a(?=b)"),
        (ConstraintForm.GRAMMAR, "root ::= nothing"),
        (ConstraintForm.JSON_SCHEMA, '{"type": "strange"}'),
        (ConstraintForm.JSON_SCHEMA, '{"$ref": "#/$defs/missing"}'),
        (ConstraintForm.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        (ConstraintForm.JSON_SCHEMA, '{"not": {"type": "string"}}'),
        (ConstraintForm.JSON_SCHEMA, '{"type": "object", "required": true}'),
        (ConstraintForm.JSON_SCHEMA, '{"type": "object", "properties": 5, "required": ["a"]}'),
        (ConstraintForm.JSON_SCHEMA, '{"type": "object", "required": [["a"]]}'),
    ],
)
def test_what_cannot_be_compiled_is_refused(backend: GrammarBackend, form: ConstraintForm, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        matcher_of(form, text, backend=backend)
    (violation,) = caught.value.violations
    assert 5 < len(violation.description) <= 400
    assert ".cc:" not in violation.description  # no place in a library's source


def test_unsupported_keywords_are_named() -> None:
    with pytest.raises(InvalidRequest, match="does not know the format binary: leave it out"):
        matcher_of(ConstraintForm.JSON_SCHEMA, '{"format": "binary"}', backend=GrammarBackend.LLGUIDANCE)
    for backend in BACKENDS:
        with pytest.raises(InvalidRequest, match=r"does not support uniqueItems.* leave"):
            matcher_of(ConstraintForm.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', backend=backend)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"enum": ["a", 1], "type": "string"}, "beside enum"),
        ({"const": 1, "minimum": 2}, "beside const"),
        ({"anyOf": [{"type": "null"}], "type": "string"}, "beside anyOf"),
        ({"items": {"$ref": "#/$defs/a", "minimum": 3}, "$defs": {"a": {"type": "integer"}}}, "beside $ref"),
        ({"type": "object", "patternProperties": {"a": {"type": "null"}}}, "patternProperties"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False}, ""),
        ({"enum": [True], "type": ["integer", "null"]}, "beside enum"),
        ({"enum": [1, None], "type": ["integer", "null"], "title": "t", "x-order": 1}, ""),
        ({"const": 1.5, "type": "number"}, ""),
        ({"const": "a", "enum": ["a"], "type": "string"}, ""),
        ({"const": "a", "enum": ["a", "b"]}, "beside "),
        ({"anyOf": [{"type": "null"}], "description": "d", "default": None, "$defs": {}}, ""),
        ({"type": "array", "items": {"$ref": "#/$defs/a", "deprecated": True}, "$defs": {"a": {"const": 1}}}, ""),
        ({"type": "object", "properties": {"enum": {"const": {"anyOf": 1, "type": 2}}}}, ""),
    ],
)
def test_what_xgrammar_reads_over_is_named(schema: dict[str, Any], wrong: str) -> None:
    found = list(not_heeded(schema))
    assert bool(found) == bool(wrong)
    assert all(wrong in name for name in found)


@pytest.mark.parametrize("reference", ["#name", "http://example.org/schema", "other.json#/a"])
def test_xgrammar_follows_no_reference_that_it_would_take_for_anything(reference: str) -> None:
    schema = json.dumps({"$ref": reference, "$defs": {"a": {"$anchor": "name", "type": "null"}}})
    with pytest.raises(InvalidRequest, match=r"\$ref"):
        matcher_of(ConstraintForm.JSON_SCHEMA, schema, backend=GrammarBackend.XGRAMMAR)


# --- reasoning ------------------------------------------------------------------------------------


def reasoning_matcher(reasoning: str | None) -> SequenceMatcher:
    backend = GrammarBackend.LLGUIDANCE
    inner = constraint(ConstraintForm.REGEX, reasoning, backend=backend) if reasoning is not None else None
    ids = tuple(tokenizer().encode("|>"))
    answer = constraint(ConstraintForm.REGEX, "[0-9]", backend=backend)
    return grammars().start_now(OutputConstraint(answer=answer, reasoning_end_ids=ids, reasoning=inner))


def test_free_reasoning_ends_with_its_marker() -> None:
    matcher = reasoning_matcher(None)
    assert allowed(matcher) == set(range(256)), "anything but the end"
    assert feed(matcher, "12 ||| > |")
    assert not matcher.may_end
    assert feed(matcher, ">")
    assert allowed(matcher) == set(tokenizer().encode("0123456789"))
    assert feed(matcher, "7")
    assert matcher.is_over
    matcher.rollback(2)
    assert allowed(matcher) == set(range(256))
    assert feed(matcher, "x||>3")
    assert matcher.is_over


def test_reasoning_under_a_constraint_of_its_own() -> None:
    matcher = reasoning_matcher("(yes|no)\\.")
    assert not feed(matcher.copy(), "maybe")
    assert feed(matcher, "no")
    assert allowed(matcher) == set(tokenizer().encode(".")), "the marker comes where the reasoning may end"
    assert feed(matcher, ".")
    (bar,) = tokenizer().encode("|")
    assert allowed(matcher) == {bar}
    assert feed(matcher, "|")
    assert allowed(matcher) == set(tokenizer().encode(">"))
    assert feed(matcher, ">5")
    assert matcher.is_over
    matcher.rollback(4)
    assert feed(matcher, ".|>6")


# --- the cache ------------------------------------------------------------------------------------


def test_few_grammars_are_kept() -> None:
    small = CompiledGrammars(make_bundle(), max_kept=2)
    outputs = [
        OutputConstraint(answer=constraint(ConstraintForm.REGEX, text, backend=GrammarBackend.LLGUIDANCE))
        for text in ("a", "b", "c", "a")
    ]
    for output in outputs:
        assert small.start_now(output).accept(tokenizer().encode(output.answer.text)[0])
    assert len(small._kept) == 2
    assert small._kept_bytes == sum(kept.memory_bytes for kept in small._kept.values())
    one = CompiledGrammars(make_bundle(), max_bytes=1)
    assert one.start_now(outputs[0]).accept(tokenizer().encode("a")[0])
    assert not one._kept


def test_a_sequence_goes_on_where_another_worker_left_it() -> None:
    output = OutputConstraint(answer=constraint(ConstraintForm.REGEX, "abc", backend=GrammarBackend.LLGUIDANCE))
    matcher = grammars().start_now(output, tokenizer().encode("ab"))
    assert allowed(matcher) == set(tokenizer().encode("c"))
    with pytest.raises(InvalidRequest, match="position 1"):
        grammars().start_now(output, tokenizer().encode("ax"))


def test_special_tokens_are_no_text(tiny_model: Path) -> None:
    """Neither backend lets a special token pass as the text that it is spelled with."""
    compiled = CompiledGrammars(read_bundle(tiny_model), apart=())
    for backend in BACKENDS:
        answer = constraint(ConstraintForm.REGEX, "(.|\n)*", backend=backend)
        mask = compiled.start_now(OutputConstraint(answer=answer)).allowed({IM_END_ID}, vocab_size=400)
        assert len(mask) == 400
        assert not mask[IM_START_ID]
        assert mask[IM_END_ID]
        assert not mask[384:].any(), "rows of the model that are no tokens"
        assert mask.sum() > 300, "all but what begins no character"
