"""Grammars that a process of its own compiles and matches, for a backend that a serving process should not import.

XGrammar imports PyTorch and Transformers: two seconds of a processor in which the interpreter is held for up to 0.3 s
at a time, which on a busy machine is longer than others wait for a sign of life. Nor can a grammar that is stuck at a
token, or breaks the library, harm more than the outputs that this library constrains.

    compile   ApartCompiler ── its channel ──▶ child        seconds; other threads wait
    match     ApartMatcher ─── its channel ──▶ child        a round trip for each token, which brings the next mask

The child (`apart_child`) is started by the first grammar, and again after it died. It ends when its channels close.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from twinstage.errors import Overloaded, TaskNotSupported, Unavailable
from twinstage.grammar.matcher import Mask, refused
from twinstage.telemetry.children import command_of, module_path
from twinstage.telemetry.log import get_logger
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, GrammarBackend

COMPILE_TIMEOUT_S = 110.0  # with the start of the process, on a busy machine
STEP_TIMEOUT_S = 10.0  # the backend's own limit is 0.5 s of a processor
CHILD = "twinstage.grammar.apart_child"
_HEADER = struct.Struct("<IB")  # bytes behind it; flags, of answers alone
_READ_BYTES = 256 * 1024  # at once: more than the mask of any vocabulary

logger = get_logger(__name__)

Operation = tuple[str, int, object]  # its name, the matcher's number, and what else it needs


class Flags(IntFlag):
    """What an answer says. Its body is the packed mask of the tokens that may come next, or words."""

    ACCEPTED = 1
    MAY_END = 2
    REFUSED = 4  # the body says why the grammar cannot go on, or cannot be compiled
    FAILED = 8  # the body says what went wrong with the library
    UNUSABLE = 16  # the body says why the library cannot be used here


@dataclass(frozen=True, slots=True)
class Answer:
    """What the child says of a matcher."""

    flags: Flags
    body: bytes

    @property
    def words(self) -> str:
        return self.body.decode(errors="replace")


class ApartCompiler:
    """Compiles grammars for one tokenizer, in a process of its own. Any thread may use it; `close` it."""

    def __init__(self, bundle: TokenizerBundle, backend: GrammarBackend) -> None:
        self._bundle = bundle
        self._backend = backend
        self._process: MatchingProcess | None = None
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> ApartMatcher:
        """A matcher at the beginning of an output.

        Raises InvalidRequest with what is wrong with the grammar, TaskNotSupported when the backend cannot be used
        here, and Unavailable when the process ends.
        """
        with self._lock:
            if self._process is None or self._process.is_lost:
                self._process = MatchingProcess(self._bundle, self._backend)
            process = self._process
        return process.compile(constraint)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._process.end()


class MatchingProcess:
    """A child and the two channels to it. Any thread may use it."""

    def __init__(self, bundle: TokenizerBundle, backend: GrammarBackend) -> None:
        self.backend = backend
        self.is_lost = False
        self._numbers = itertools.count(1)
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as unless_started:
            for end in theirs:
                stack.enter_context(end)
            for end in ours:
                unless_started.enter_context(end)
            self._child = _start([end.fileno() for end in theirs])
            unless_started.pop_all()
        self._compiling, self._matching = _Channel(ours[0], COMPILE_TIMEOUT_S), _Channel(ours[1], STEP_TIMEOUT_S)
        self._compiling.later(("prepare", 0, {"bundle": bundle.to_bytes().decode(), "backend": backend.value}))

    def compile(self, constraint: Constraint) -> ApartMatcher:
        """As `ApartCompiler.compile` says."""
        number = next(self._numbers)
        grammar = {"form": constraint.form.value, "text": constraint.text, "choices": constraint.choices}
        answer = self._ask(self._compiling, ("compile", number, grammar))
        if Flags.UNUSABLE in answer.flags:
            self.end()
            raise TaskNotSupported(f"{self.backend.value} cannot be used by this worker: {answer.words}")
        if Flags.REFUSED in answer.flags:
            raise refused(answer.words)
        (size,) = struct.unpack_from("<Q", answer.body)
        state = Answer(answer.flags, answer.body[8:])
        return ApartMatcher(self, number, state, memory_bytes=size)

    def step(self, name: str, number: int, argument: int) -> Answer:
        """What a matcher says after an operation. Raises Unavailable."""
        return self._ask(self._matching, (name, number, argument))

    def copy(self, number: int) -> int:
        """The number of another matcher in the same state. Raises Unavailable when the process is gone."""
        self._check()
        other = next(self._numbers)
        self._matching.later(("copy", number, other))
        return other

    def forget(self, number: int) -> None:
        """Drop a matcher that nobody needs. Whichever thread collects garbage calls this, so it waits for nothing."""
        self._matching.later(("drop", number, None))

    def end(self) -> None:
        """Kill the child. Idempotent."""
        self.is_lost = True
        self._child.kill()
        self._child.wait()
        self._compiling.close()
        self._matching.close()

    def _ask(self, channel: _Channel, operation: Operation) -> Answer:
        self._check()
        try:
            answer = channel.ask(operation)
        except TimeoutError:
            self.end()
            if channel is self._compiling:
                raise Overloaded(f"the output's grammar was not compiled within {channel.timeout_s:g} s") from None
            # The grammar may be to blame, or a machine that has no time for the child: who tries again will see.
            raise Unavailable(f"{self.backend.value} gave no answer within {channel.timeout_s:g} s") from None
        except OSError:
            if not self.is_lost:
                logger.warning("the process that matches grammars ended", backend=self.backend.value)
            self.end()
            self._check()
            raise
        if Flags.FAILED in answer.flags:
            raise Unavailable(f"{self.backend.value} failed with the output's grammar: {answer.words}")
        return answer

    def _check(self) -> None:
        if self.is_lost:
            raise Unavailable(f"the process in which {self.backend.value} matches grammars ended; try again")


class ApartMatcher:
    """A BackendMatcher over one in a child."""

    def __init__(self, process: MatchingProcess, number: int, state: Answer, *, memory_bytes: int) -> None:
        self._process = process
        self._number = number
        self._state = state
        self.memory_bytes = memory_bytes

    def __del__(self) -> None:
        self._process.forget(self._number)

    def allowed(self) -> Mask:
        """As the protocol says."""
        if Flags.REFUSED in self._state.flags:
            raise refused(self._state.words)
        return np.unpackbits(np.frombuffer(self._state.body, dtype=np.uint8), bitorder="little").view(np.bool_)

    @property
    def may_end(self) -> bool:
        return Flags.MAY_END in self._state.flags

    def accept(self, token_id: int) -> bool:
        """As the protocol says. Raises Unavailable when the process is gone."""
        state = self._process.step("accept", self._number, token_id)
        if Flags.ACCEPTED in state.flags:
            self._state = state
        return Flags.ACCEPTED in state.flags

    def rollback(self, count: int) -> None:
        """As the protocol says. Raises Unavailable when the process is gone."""
        self._state = self._process.step("rollback", self._number, count)

    def copy(self) -> ApartMatcher:
        """As the protocol says. Raises Unavailable when the process is gone."""
        number = self._process.copy(self._number)
        return ApartMatcher(self._process, number, self._state, memory_bytes=self.memory_bytes)


class _Channel:
    """One question at a time, each with the operations before it that need no answer."""

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        end.settimeout(timeout_s)
        self._end = end
        self._waiting: deque[Operation] = deque()
        self._lock = threading.Lock()

    def later(self, operation: Operation) -> None:
        """Do this before what is asked next."""
        self._waiting.append(operation)

    def ask(self, operation: Operation) -> Answer:
        """Raises OSError, which TimeoutError is one of."""
        with self._lock:
            operations = [self._waiting.popleft() for _ in range(len(self._waiting))]
            send(self._end, json.dumps([*operations, operation]).encode())
            flags, body = receive(self._end)
            return Answer(Flags(flags), body)

    def close(self) -> None:
        """To be called when the other end is gone, so that nobody waits for it any more."""
        with self._lock:
            self._end.close()


def send(end: socket.socket, body: bytes, flags: int = 0) -> None:
    """Send a message. Raises OSError."""
    end.sendall(_HEADER.pack(len(body), flags) + body)


def receive(end: socket.socket) -> tuple[int, bytes]:
    """Flags and body of the next message, behind which nothing comes before it is answered. Raises OSError."""
    data = _some(end)
    while len(data) < _HEADER.size:
        data += _some(end)
    size, flags = _HEADER.unpack_from(data)
    while len(data) < _HEADER.size + size:
        data += _some(end)
    return flags, bytes(data[_HEADER.size :])


def _some(end: socket.socket) -> bytearray:
    data = bytearray(end.recv(_READ_BYTES))
    if not data:
        raise ConnectionResetError("the other end is gone")
    return data


def _start(file_numbers: list[int]) -> subprocess.Popen[bytes]:
    environment = os.environ | module_path() | {"OMP_NUM_THREADS": "1"}
    command = command_of(CHILD, *map(str, file_numbers))
    nowhere = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command, env=environment, pass_fds=file_numbers, stdin=nowhere, stdout=nowhere, stderr=nowhere
        )
    except OSError as error:
        raise Unavailable(f"no process that matches grammars could be started: {error.strerror or error}") from error
