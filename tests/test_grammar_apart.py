"""Matchers in a process of their own say what they say in this one, and nobody is stuck when the process is.

The children here run llguidance, which is imported in a moment; what they do does not depend on the backend.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fake_workers import make_bundle
from twinstage.errors import InvalidRequest, Unavailable
from twinstage.grammar import apart
from twinstage.grammar.apart import ApartCompiler, MatchingProcess
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.grammar.llguidance_backend import LlguidanceCompiler
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend, OutputConstraint

BACKEND = GrammarBackend.LLGUIDANCE
BUNDLE = make_bundle()
TOKENIZER = TextTokenizer(BUNDLE)
JSON = Constraint(backend=BACKEND, form=ConstraintForm.JSON_OBJECT)


def regex(text: str) -> Constraint:
    return Constraint(backend=BACKEND, form=ConstraintForm.REGEX, text=text)


@pytest.fixture(scope="module")
def grammars() -> Iterator[CompiledGrammars]:
    grammars = CompiledGrammars(BUNDLE, apart={BACKEND})
    yield grammars
    grammars.close()


def process_of(grammars: CompiledGrammars) -> MatchingProcess:
    compiler = grammars._compilers.prepare(BACKEND)
    assert isinstance(compiler, ApartCompiler)
    assert compiler._process is not None
    return compiler._process


def feed(matcher: apart.ApartMatcher, text: str) -> bool:
    return all(matcher.accept(token_id) for token_id in TOKENIZER.encode(text))


def test_random_walks_are_those_of_a_matcher_in_this_process(grammars: CompiledGrammars) -> None:
    choose, near, far = random.Random(3), LlguidanceCompiler(BUNDLE).compile(JSON), grammars._matcher(JSON)
    taken = 0
    for _ in range(80):
        mask, expected = far.allowed(), near.allowed()
        assert np.array_equal(mask[: len(expected)], expected)
        assert not mask[len(expected) :].any()
        assert far.may_end == near.may_end
        token_id = int(choose.choice(expected.nonzero()[0])) if choose.random() < 0.9 and expected.any() else 7
        assert far.accept(token_id) == near.accept(token_id)
        taken += bool(expected[token_id])
        if choose.random() < 0.2 and taken > 2:
            far.rollback(2)
            near.rollback(2)
            taken -= 2
        if choose.random() < 0.2:
            far = far.copy()


def test_copies_go_their_own_ways_and_are_dropped_in_the_child(grammars: CompiledGrammars) -> None:
    first = grammars._matcher(regex("(ab|ac)d"))
    assert isinstance(first, apart.ApartMatcher)
    assert feed(first, "a")
    second = first.copy()
    assert feed(first, "b")
    assert feed(second, "cd")
    assert not second.allowed().any()
    del first
    assert "drop" in [name for name, _, _ in process_of(grammars)._matching._waiting]
    second.rollback(1)
    assert feed(second, "d")


def test_what_is_wrong_is_told(grammars: CompiledGrammars) -> None:
    with pytest.raises(InvalidRequest, match="structured_output"):
        grammars._matcher(regex("("))
    with pytest.raises(InvalidRequest, match="position 1"):
        grammars.start_now(OutputConstraint(answer=regex("abc")), TOKENIZER.encode("ax"))


def test_the_end_of_the_process_ends_what_it_matched_and_nothing_else(grammars: CompiledGrammars) -> None:
    matcher = grammars.start_now(OutputConstraint(answer=regex("abc")))
    process = process_of(grammars)
    process._matching._end.shutdown(socket.SHUT_RDWR)  # as when this process dies, and the child ends by itself
    assert process._child.wait(20) == 0
    with pytest.raises(Unavailable, match="try again"):
        matcher.accept(TOKENIZER.encode("a")[0])
    with pytest.raises(Unavailable, match="try again"):
        matcher.copy()
    again = grammars.start_now(OutputConstraint(answer=regex("abc")), TOKENIZER.encode("ab"))
    assert again.allowed((), vocab_size=300).nonzero()[0].tolist() == TOKENIZER.encode("c")


def test_nobody_waits_for_a_process_that_is_stuck(grammars: CompiledGrammars) -> None:
    matcher, other = (grammars.start_now(OutputConstraint(answer=regex("abc"))) for _ in range(2))
    process = process_of(grammars)
    process._matching._end.settimeout(0.05)
    os.kill(process._child.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="no answer within"):  # nobody knows that it was the grammar's fault
        matcher.accept(TOKENIZER.encode("a")[0])
    with pytest.raises(Unavailable):
        other.accept(TOKENIZER.encode("a")[0])
    assert time.monotonic() - started_s < apart.STEP_TIMEOUT_S / 2
    assert process._child.poll() == -signal.SIGKILL
