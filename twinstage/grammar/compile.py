"""Compiling a constraint for a tokenizer, by whichever backend it names. Backends are imported when they are needed."""

from __future__ import annotations

import threading
from typing import Protocol

from twinstage.grammar.matcher import BackendMatcher, refused
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, GrammarBackend


class Compiler(Protocol):
    """Compiles grammars for one tokenizer; `compile` raises InvalidRequest. Any thread may use it."""

    def compile(self, constraint: Constraint) -> BackendMatcher: ...


class Compilers:
    """The compilers of one tokenizer, each made when it is first needed. Any thread may use them."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self._bundle = bundle
        self._compilers: dict[GrammarBackend, Compiler] = {}
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> BackendMatcher:
        """A matcher at the beginning of an output. Raises InvalidRequest with what is wrong with the grammar."""
        matcher = self.prepare(constraint.backend).compile(constraint)
        if not matcher.allowed().any():
            raise refused("allows nothing but an empty output" if matcher.may_end else "allows no output")
        return matcher

    def prepare(self, backend: GrammarBackend) -> Compiler:
        """Import a backend and read the tokenizer for it, once."""
        with self._lock:
            if backend not in self._compilers:
                self._compilers[backend] = _make(backend, self._bundle)
            return self._compilers[backend]


def _make(backend: GrammarBackend, bundle: TokenizerBundle) -> Compiler:
    if backend is GrammarBackend.LLGUIDANCE:
        from twinstage.grammar.llguidance_backend import LlguidanceCompiler

        return LlguidanceCompiler(bundle)
    from twinstage.grammar.xgrammar_backend import XgrammarCompiler

    return XgrammarCompiler(bundle)
