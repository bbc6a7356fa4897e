"""Grammars by llguidance: JSON schemas, regular expressions, choices and Lark grammars.

It computes within limits (fuel, states, items) and says so when it reaches one, when it compiles and at each token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from twinstage.grammar.matcher import Mask, refused, shortened
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, ConstraintForm

# Indentation needs some white space, and a model that has lost its way must not write nothing else for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # some 15 ms
    step_max_items=50_000,  # some 3 ms
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # of 1 to 2 KiB
    max_grammar_size=500_000,
    verbose_errors=False,
)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_BYTES = 64 * 1024  # the library tells no figure, so this is a guess
_BYTES_A_CHARACTER = 64


class LlguidanceCompiler:
    """Compiles grammars for one tokenizer. Any thread may use it."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        eos_token_id = bundle.eos_token_ids[0] if bundle.eos_token_ids else None
        self._tokenizer = llguidance.LLTokenizer(bundle.tokenizer_json, eos_token=eos_token_id)
        self._eos_token_id = int(self._tokenizer.eos_token)

    def compile(self, constraint: Constraint) -> LlguidanceMatcher:
        """A matcher at the beginning of an output. Raises InvalidRequest with what is wrong with the grammar."""
        try:
            grammar = _grammar_of(constraint)
        except Exception as error:  # the converter from EBNF raises nothing more special
            raise refused(shortened(str(error))) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise refused(shortened(_advised(matcher.get_error())))
        return LlguidanceMatcher(matcher, self._eos_token_id, memory_bytes=_BYTES + _BYTES_A_CHARACTER * len(grammar))


class LlguidanceMatcher:
    """A BackendMatcher over `llguidance.LLMatcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_id: int, *, memory_bytes: int) -> None:
        self._matcher = matcher
        self._eos_token_id = eos_token_id
        self.memory_bytes = memory_bytes

    def allowed(self) -> Mask:
        """As the protocol says."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise refused(shortened(self._matcher.get_error()))
        mask = np.unpackbits(packed, bitorder="little").view(np.bool_)
        mask[self._eos_token_id] = False
        return mask

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    def accept(self, token_id: int) -> bool:
        """As the protocol says."""
        if token_id == self._eos_token_id:
            return False
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def rollback(self, count: int) -> None:
        """As the protocol says."""
        if not self._matcher.rollback(count):
            raise refused(shortened(self._matcher.get_error()))

    def copy(self) -> LlguidanceMatcher:
        """As the protocol says."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._eos_token_id, memory_bytes=self.memory_bytes)


_JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}


def _grammar_of(constraint: Constraint) -> str:
    """The grammar as llguidance reads it."""
    to_grammar = llguidance.LLMatcher
    match constraint.form:
        case ConstraintForm.JSON_SCHEMA:
            return str(to_grammar.grammar_from_json_schema(constraint.text, defaults=_JSON_OPTIONS))
        case ConstraintForm.JSON_OBJECT:
            return str(to_grammar.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_OPTIONS))
        case ConstraintForm.REGEX:
            return str(to_grammar.grammar_from_regex(constraint.text))
        case ConstraintForm.CHOICE:
            return str(to_grammar.grammar_from_lark(_lark_of_choices(constraint.choices)))
        case ConstraintForm.GRAMMAR:
            return str(to_grammar.grammar_from_lark(any_to_lark(constraint.text)))
        case ConstraintForm.STRUCTURAL_TAG:
            raise ValueError("llguidance has no structural_tag")


def _advised(message: str) -> str:
    """What the library says of a schema that it does not support, with what to do."""
    if match := _UNIMPLEMENTED.search(message):
        return f"llguidance does not support {match[1].replace(chr(34), '')}: leave that out"
    if match := _UNKNOWN_FORMAT.search(message):
        return f"llguidance does not know the format {match[1]}: leave it out, or say it by a pattern"
    return message


def _lark_of_choices(choices: Sequence[str]) -> str:
    """One terminal, so that all choices together are one automaton."""
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return "start: CHOICE\nCHOICE: " + " | ".join(texts)  # Lark's texts have no control characters
