"""Renders templates that nobody vouches for, each in a process of its own that can be killed at any time.

The sandbox keeps a template from what is not its own, but a template is still a program: `range` in `range` computes
for ever, and a list that doubles fills the memory. So it runs where that harms nobody: in a process that gets so many
seconds of a CPU and so much memory, that opens no files and starts no programs, that has no environment with secrets,
and that sees nothing of other requests.
"""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import Process
from dataclasses import dataclass
from typing import Any

from twinstage.errors import FieldViolation, InternalError, InvalidRequest, Overloaded
from twinstage.telemetry.children import start_bare
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.chat_template import MAX_RENDERED_CHARACTERS, Rendering, finish, prepare

MAX_PENDING_PER_PROCESS = 32
_MAX_ANSWER_BYTES = 6 * MAX_RENDERED_CHARACTERS + 4096  # a control character takes 6 in JSON, others up to 4
_PIECE_BYTES = 1024 * 1024
_CHILD = "twinstage.text.template_child"
_CHILD_ENVIRONMENT = ("TZ",)  # for strftime_now to tell the time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What one rendering gets. A Python process that has done nothing yet has taken about 0.1 s and 60 MiB."""

    cpu_s: int = 3
    memory_bytes: int = 512 * 1024 * 1024
    wall_s: float = 20.0  # for a machine that is busy otherwise; a template cannot wait for anything


class TemplateProcesses:
    """Renders conversations with the templates they bring, a few at once; the others wait, and too many are refused."""

    def __init__(self, at_once: int = 2, *, limits: ProcessLimits | None = None) -> None:
        self._limits = limits or ProcessLimits()
        self._slots = asyncio.Semaphore(at_once)
        self._max_pending = at_once * MAX_PENDING_PER_PROCESS
        self._pending = 0

    async def render(self, bundle: TokenizerBundle, prompt: Any) -> str:
        """As `render_chat`. Raises InvalidRequest, also for a template above the limits, and Overloaded."""
        if self._pending >= self._max_pending:
            raise Overloaded(f"{self._pending} chat templates of requests are being rendered; try again")
        rendering = prepare(bundle, prompt)
        self._pending += 1
        try:
            async with self._slots:
                return finish(rendering, await self._run(rendering))
        finally:
            self._pending -= 1

    async def _run(self, rendering: Rendering) -> str:
        task = await asyncio.to_thread(_encode_task, rendering, self._limits)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                exit_code, answer = await _ask_process(task)
        except TimeoutError:
            raise Overloaded(f"the chat template was not rendered within {self._limits.wall_s:g} s") from None
        if exit_code == -signal.SIGXCPU:
            raise _refused(rendering, f"computes for more than {self._limits.cpu_s} s")
        if len(answer) > _MAX_ANSWER_BYTES:
            raise _refused(rendering, f"gives more than {MAX_RENDERED_CHARACTERS} characters")
        if exit_code != 0:
            raise _refused(rendering, f"needs more than {self._limits.memory_bytes} bytes of memory, or is broken")
        return await asyncio.to_thread(_decode_answer, answer)


async def _ask_process(task: bytes) -> tuple[int, bytes]:
    """The exit code and the answer of a process that was given `task`. It has ended when this returns or raises.

    Raises Overloaded when there is no room for one.
    """
    process = await start_bare(_CHILD, keeps=_CHILD_ENVIRONMENT)
    try:
        answer, _ = await asyncio.gather(_read_answer(process), _write_task(process, task))
        return await _exit_code(process), answer
    finally:
        if process.returncode is None:
            process.kill()
        await _exit_code(process)


async def _exit_code(process: Process) -> int:
    """Wait until it has ended. `Process.wait` also waits for the ends of its pipes, and asyncio reads a pipe on only
    while somebody takes what has come: so the rest of what it says is taken here.
    """
    assert process.stdout is not None
    while await process.stdout.read(_PIECE_BYTES):
        pass
    return await process.wait()


async def _write_task(process: Process, task: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(task)
        await process.stdin.drain()
    except ConnectionError:  # it has ended, and its exit code says why
        pass
    process.stdin.close()


async def _read_answer(process: Process) -> bytes:
    """All that the process says, as far as an answer can go; a process that says more is killed."""
    assert process.stdout is not None
    answer = bytearray()
    while piece := await process.stdout.read(_PIECE_BYTES):
        answer += piece
        if len(answer) > _MAX_ANSWER_BYTES:
            process.kill()
            break
    return bytes(answer)


def _refused(rendering: Rendering, why: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(rendering.blamed_field, f"the chat template {why}")])


def _encode_task(rendering: Rendering, limits: ProcessLimits) -> bytes:
    document = {
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "template": rendering.template,
        "variables": dict(rendering.variables),
        "blamed_field": rendering.blamed_field,
        "continues": rendering.continues,
    }
    return json.dumps(document).encode()


def _decode_answer(answer: bytes) -> str:
    try:
        document = json.loads(answer)
    except ValueError as error:
        raise InternalError("the process that renders a chat template gave no answer") from error
    if "text" in document:
        return str(document["text"])
    raise InvalidRequest([FieldViolation(entry["field"], entry["description"]) for entry in document["violations"]])
