"""Compiling a constraint for a tokenizer, by whichever backend it names. Backends are imported when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Protocol

from twinstage.grammar.apart import ApartCompiler
from twinstage.grammar.matcher import BackendMatcher, refused
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, GrammarBackend


class Compiler(Protocol):
    """Compiles grammars for one tokenizer; `compile` raises InvalidRequest. Any thread may use it."""

    def compile(self, constraint: Constraint) -> BackendMatcher: ...


class Compilers:
    """The compilers of one tokenizer, each made when it is first needed. Any thread may use them."""

    def __init__(self, bundle: TokenizerBundle, *, apart: Collection[GrammarBackend] = ()) -> None:
        """Backends in `apart` run in a process of their own; `close` ends it."""
        self._bundle = bundle
        self._apart = frozenset(apart)
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
                apart = backend in self._apart
                self._compilers[backend] = (
                    ApartCompiler(self._bundle, backend) if apart else import_compiler(backend, self._bundle)
                )
            return self._compilers[backend]

    def close(self) -> None:
        """End the processes of backends that run apart."""
        for compiler in self._compilers.values():
            if isinstance(compiler, ApartCompiler):
                compiler.close()


def import_compiler(backend: GrammarBackend, bundle: TokenizerBundle) -> Compiler:
    """A compiler in this process. Raises ModelError when the backend is not installed, and what it says itself."""
    if backend is GrammarBackend.LLGUIDANCE:
        from twinstage.grammar.llguidance_backend import LlguidanceCompiler

        return LlguidanceCompiler(bundle)
    from twinstage.grammar.xgrammar_backend import XgrammarCompiler

    return XgrammarCompiler(bundle)
