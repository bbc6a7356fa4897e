"""Grammars by XGrammar: JSON schemas, regular expressions, choices, EBNF and Lark grammars, structural tags.

Importing it imports PyTorch and Transformers, which takes a second or two, so workers have it in a process of its own
(`apart`).
It has no limits of its own. Compiling is `checking`'s to limit; a grammar that is slow at a token is ended behind it.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import llguidance
import numpy as np

from twinstage.errors import ModelError
from twinstage.grammar.matcher import Mask, refused, shortened
from twinstage.grammar.shape import is_ebnf
from twinstage.grammar.xgrammar_schemas import not_heeded
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import Constraint, ConstraintForm

try:
    import xgrammar
except ImportError as error:
    raise ModelError("xgrammar is not installed here: install it (twinstage[xgrammar]), or take llguidance") from error

_MAX_WHITESPACE = 20  # as with llguidance
_MAX_STEP_S = 0.5
_BITS_OF_WORD = 32
_PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is (?:true|false): )?")  # before a message


class XgrammarCompiler:
    """Compiles grammars for one tokenizer. Any thread may use it."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        vocabulary = _vocabulary(bundle)
        # A stop token of its own, behind all others: what ends a generation is `SequenceMatcher`'s business.
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary) + 1, stop_token_ids=[len(vocabulary)])
        self._vocab_size = len(vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, constraint: Constraint) -> XgrammarMatcher:
        """A matcher at the beginning of an output. Raises InvalidRequest with what is wrong with the grammar."""
        _check_supported(constraint)
        try:
            compiled = self._compile(constraint)
        except Exception as error:  # the library raises what it likes, RuntimeError as a rule
            raise refused(shortened(_PLACE_IN_SOURCE.sub("", str(error)))) from error
        matcher = xgrammar.GrammarMatcher(compiled)
        return XgrammarMatcher(matcher, self._vocab_size, memory_bytes=compiled.memory_size_bytes)

    def _compile(self, constraint: Constraint) -> Any:
        compiler, text = self._compiler, constraint.text
        match constraint.form:
            case ConstraintForm.JSON_SCHEMA:
                return self._compile_schema(text)
            case ConstraintForm.JSON_OBJECT:
                return self._compile_schema('{"type": "object"}')
            case ConstraintForm.REGEX:
                return compiler.compile_regex(text)
            case ConstraintForm.CHOICE:
                choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
                return compiler.compile_grammar(f"root ::= {choices}")
            case ConstraintForm.GRAMMAR:
                return compiler.compile_grammar(text) if is_ebnf(text) else compiler.compile_lark(text)
            case ConstraintForm.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(text)

    def _compile_schema(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE)


class XgrammarMatcher:
    """A BackendMatcher over `xgrammar.GrammarMatcher`."""

    def __init__(self, matcher: Any, vocab_size: int, *, memory_bytes: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.memory_bytes = memory_bytes

    def allowed(self) -> Mask:
        """As the protocol says."""
        words = np.full((1, self._vocab_size // _BITS_OF_WORD + 1), -1, dtype=np.int32)
        started_s = time.thread_time()
        self._matcher.fill_next_token_bitmask(words)
        if time.thread_time() - started_s > _MAX_STEP_S:  # once: it held up all that run beside it
            raise refused(f"takes more than {_MAX_STEP_S:g} s of a processor for one token")
        return np.unpackbits(words.view(np.uint8)[0], count=self._vocab_size, bitorder="little").view(np.bool_)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def accept(self, token_id: int) -> bool:
        """As the protocol says."""
        return token_id < self._vocab_size and bool(self._matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        """As the protocol says."""
        self._matcher.rollback(count)

    def copy(self) -> XgrammarMatcher:
        """As the protocol says."""
        return XgrammarMatcher(self._matcher.fork(), self._vocab_size, memory_bytes=self.memory_bytes)


def _vocabulary(bundle: TokenizerBundle) -> list[bytes]:
    """The bytes of every token; none for special ones, which are no text."""
    tokenizer, special = llguidance.LLTokenizer(bundle.tokenizer_json), TextTokenizer(bundle).special_token_ids
    return [
        b"" if token_id in special else tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)
    ]


def _check_supported(constraint: Constraint) -> None:
    """Raise InvalidRequest that names the keywords of a schema which would not be heeded."""
    if constraint.form is not ConstraintForm.JSON_SCHEMA:
        return
    if found := sorted(set(not_heeded(json.loads(constraint.text)))):
        raise refused(f"xgrammar does not support {', '.join(found)}; take llguidance, or leave it out")
