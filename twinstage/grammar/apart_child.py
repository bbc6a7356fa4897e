"""The process that compiles and matches grammars for another one; see `apart`, which starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
from typing import Any

import numpy as np

from twinstage.errors import InvalidRequest
from twinstage.grammar.apart import Answer, Flags, receive, send
from twinstage.grammar.compile import Compiler, import_compiler
from twinstage.grammar.matcher import BackendMatcher
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend

_MAX_WORDS = 400


class _Matchers:
    """The matchers of this process, by the numbers that the other one gave them. Two threads use it."""

    def __init__(self) -> None:
        self._by_number: dict[int, BackendMatcher] = {}
        self._backend = GrammarBackend.XGRAMMAR
        self._compiler: Compiler | None = None
        self._unusable = ""

    def do(self, name: str, number: int, argument: Any) -> Answer | None:
        """An operation's answer; None for those that have none."""
        match name:
            case "prepare":
                self._prepare(argument)
                return None
            case "compile":
                return self._compile(number, argument)
            case "copy":
                self._by_number[argument] = self._by_number[number].copy()
                return None
            case "drop":
                self._by_number.pop(number, None)
                return None
            case "rollback":
                self._by_number[number].rollback(argument)
                return _state_of(self._by_number[number])
            case "accept":
                if not self._by_number[number].accept(argument):
                    return Answer(Flags(0), b"")
                state = _state_of(self._by_number[number])
                return Answer(state.flags | Flags.ACCEPTED, state.body)
        raise ValueError(f"no operation {name}")

    def _prepare(self, how: dict[str, str]) -> None:
        self._backend = GrammarBackend(how["backend"])
        try:
            self._compiler = import_compiler(self._backend, TokenizerBundle.from_bytes(how["bundle"].encode()))
        except Exception as error:  # whatever a backend says of a tokenizer that it does not understand
            self._unusable = f"{error}"

    def _compile(self, number: int, grammar: dict[str, Any]) -> Answer:
        if self._compiler is None:
            return Answer(Flags.UNUSABLE, _words(self._unusable))
        constraint = Constraint(
            backend=self._backend,
            form=ConstraintForm(grammar["form"]),
            text=grammar["text"],
            choices=tuple(grammar["choices"]),
        )
        try:
            matcher = self._compiler.compile(constraint)
        except InvalidRequest as error:
            return Answer(Flags.REFUSED, _words(error.violations[0].description))
        self._by_number[number] = matcher
        state = _state_of(matcher)
        return Answer(state.flags, struct.pack("<Q", matcher.memory_bytes) + state.body)


def _state_of(matcher: BackendMatcher) -> Answer:
    flags = Flags.MAY_END if matcher.may_end else Flags(0)
    try:
        mask = matcher.allowed()
    except InvalidRequest as error:
        return Answer(flags | Flags.REFUSED, _words(error.violations[0].description))
    return Answer(flags, np.packbits(mask, bitorder="little").tobytes())


def _words(text: str) -> bytes:
    return text[:_MAX_WORDS].encode()


def _serve(channel: socket.socket, matchers: _Matchers) -> None:
    """Answer until the other end is gone, and then end the process."""
    try:
        while True:
            _, body = receive(channel)
            answer = _answer(json.loads(body), matchers)
            send(channel, answer.body, answer.flags)
    finally:
        os._exit(0)


def _answer(operations: list[tuple[str, int, Any]], matchers: _Matchers) -> Answer:
    """Of the last operation, after the others."""
    try:
        answers = [matchers.do(*operation) for operation in operations]
    except Exception as error:  # the library raises what it likes; the other end decides what becomes of it
        return Answer(Flags.FAILED, _words(f"{error!r}"))
    return answers[-1] or Answer(Flags.FAILED, b"nothing was asked")


def main() -> None:
    """Serve the two channels whose file numbers the arguments are."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the other process ends this one
    compiling, matching = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    matchers = _Matchers()
    threading.Thread(target=_serve, args=(compiling, matchers), daemon=True).start()
    _serve(matching, matchers)


if __name__ == "__main__":
    main()
