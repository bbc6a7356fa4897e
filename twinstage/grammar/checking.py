"""Judges constraints for the router: each grammar is compiled, in a process that can be killed at any time.

A grammar is a small program for a compiler written in C++ or Rust: a few characters can ask for hours, for all memory,
or for a stack that there is not. So it is compiled where that harms nobody, within so many seconds of a CPU and so much
memory, before its request is queued; workers then compile what is known to compile. Verdicts are remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import struct
from asyncio.subprocess import Process
from collections import OrderedDict
from dataclasses import dataclass

from twinstage.errors import FieldViolation, InvalidRequest, Overloaded, TaskNotSupported
from twinstage.grammar.resolve import resolve_constraint
from twinstage.telemetry.children import start_bare
from twinstage.telemetry.log import get_logger
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types.constraints import Constraint, GrammarBackend, OutputConstraint, RawStructuredOutput

MAX_PENDING = 64
MAX_REMEMBERED = 4096
_CHECKS_PER_PROCESS = 5000  # should a library leak, it does not leak for ever
_MAX_TOKENIZERS = 4  # some hundred MiB each, when they are large
_FRAME = struct.Struct("<I")
_CHILD = "twinstage.grammar.checking_child"

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """What compiling one grammar may take. `wall_s` includes the start of the process, on a machine that is busy."""

    cpu_s: float = 3.0
    memory_bytes: int = 1024 * 1024 * 1024
    wall_s: float = 60.0


class GrammarChecks:
    """Judges constraints, one at a time for each backend. Belongs to one event loop; `close` it."""

    def __init__(self, *, default_backend: GrammarBackend | None = None, limits: CheckLimits | None = None) -> None:
        """`default_backend` is for requests that name none; None chooses by the form of the constraint."""
        self._default_backend = default_backend
        self._limits = limits or CheckLimits()
        self._compilers: dict[GrammarBackend, _CompilerProcess] = {}
        self._remembered: OrderedDict[str, str] = OrderedDict()  # what is wrong, by key; empty: nothing
        self._pending: dict[str, asyncio.Task[str]] = {}

    async def judge(self, raw: RawStructuredOutput, tokenizer: TextTokenizer) -> OutputConstraint:
        """The constraint for workers. `raw` has passed `shape_violations`.

        Raises InvalidRequest with what is wrong, and Overloaded when too many grammars wait to be compiled.
        """
        constraint = resolve_constraint(raw, tokenizer, default_backend=self._default_backend)
        await self._check(constraint.answer, tokenizer, path="structured_output")
        if constraint.reasoning is not None:
            await self._check(constraint.reasoning, tokenizer, path="structured_output.reasoning.constraint")
        return constraint

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        for compiler in self._compilers.values():
            await compiler.end()

    async def _check(self, constraint: Constraint, tokenizer: TextTokenizer, *, path: str) -> None:
        if wrong := await self._verdict(constraint, tokenizer):
            raise InvalidRequest([FieldViolation(f"{path}.{constraint.form.value}", wrong)])

    async def _verdict(self, constraint: Constraint, tokenizer: TextTokenizer) -> str:
        key = _key(constraint, tokenizer)
        if (known := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            return known
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= MAX_PENDING:
                raise Overloaded(f"{len(self._pending)} grammars are being compiled; try again")
            task = self._pending[key] = asyncio.create_task(self._compile(key, constraint, tokenizer), name="grammar")
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        return await asyncio.shield(task)  # a client that leaves does not undo what others may wait for

    async def _compile(self, key: str, constraint: Constraint, tokenizer: TextTokenizer) -> str:
        compiler = self._compilers.get(constraint.backend)
        if compiler is None:
            compiler = self._compilers[constraint.backend] = _CompilerProcess(self._limits)
        wrong = await compiler.check(constraint, tokenizer)
        self._remembered[key] = wrong
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return wrong


class _CompilerProcess:
    """The process of one backend. It is started when it is needed, and again after it was killed."""

    def __init__(self, limits: CheckLimits) -> None:
        self._limits = limits
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._known: set[str] = set()  # fingerprints of tokenizers that the process has
        self._num_checks = 0  # left to it

    async def check(self, constraint: Constraint, tokenizer: TextTokenizer) -> str:
        """What is wrong with a grammar; empty when nothing is. Raises Overloaded when there was no time for it."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._limits.wall_s):
                    return await self._exchange(constraint, tokenizer)
            except TimeoutError:
                await self.end()
                raise Overloaded(f"the grammar was not compiled within {self._limits.wall_s:g} s") from None
            except BaseException:  # what it still answers would be taken for the answer to the next
                await self.end()
                raise

    async def end(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        self._known.clear()
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _exchange(self, constraint: Constraint, tokenizer: TextTokenizer) -> str:
        fingerprint = tokenizer.bundle.fingerprint
        process = await self._process_for(fingerprint)
        task = await asyncio.to_thread(
            _encode_task, constraint, tokenizer, self._limits, with_bundle=fingerprint not in self._known
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(_FRAME.pack(len(task)) + task)
            await process.stdin.drain()
            (size,) = _FRAME.unpack(await process.stdout.readexactly(_FRAME.size))
            answer = json.loads(await process.stdout.readexactly(size))
        except (ConnectionError, asyncio.IncompleteReadError):
            return await self._cause_of_death(process)
        if answer["unusable"]:
            await self.end()
            raise TaskNotSupported(
                f"{constraint.backend.value} cannot use this model's tokenizer: {answer['unusable']}"
            )
        self._known.add(fingerprint)
        return str(answer["wrong"])

    async def _process_for(self, fingerprint: str) -> Process:
        """The process, or a new one in the place of one that is dead, has too many tokenizers or is old."""
        has_room = fingerprint in self._known or len(self._known) < _MAX_TOKENIZERS
        if self._process is None or self._process.returncode is not None or not has_room or self._num_checks == 0:
            await self.end()
            self._process, self._num_checks = await start_bare(_CHILD), _CHECKS_PER_PROCESS
        self._num_checks -= 1
        return self._process

    async def _cause_of_death(self, process: Process) -> str:
        exit_code = await process.wait()
        logger.warning("a grammar ended the process that compiled it", exit_code=exit_code)
        await self.end()
        if exit_code == -signal.SIGPROF:
            return f"takes more than {self._limits.cpu_s:g} s of a processor to compile"
        return f"needs more than {self._limits.memory_bytes} bytes of memory to compile, or breaks the compiler"


def _key(constraint: Constraint, tokenizer: TextTokenizer) -> str:
    parts = (tokenizer.bundle.fingerprint, constraint.backend.value, constraint.form.value, constraint.text)
    return hashlib.sha256(json.dumps([*parts, *constraint.choices]).encode()).hexdigest()


def _encode_task(constraint: Constraint, tokenizer: TextTokenizer, limits: CheckLimits, *, with_bundle: bool) -> bytes:
    document = {
        "fingerprint": tokenizer.bundle.fingerprint,
        "bundle": tokenizer.bundle.to_bytes().decode() if with_bundle else None,
        "backend": constraint.backend.value,
        "form": constraint.form.value,
        "text": constraint.text,
        "choices": constraint.choices,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
    }
    return json.dumps(document).encode()
