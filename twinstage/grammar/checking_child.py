"""The process in which the grammars of requests are compiled, one after the other; see `checking`, which starts it."""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import sys
import threading
from typing import Any

from twinstage.errors import InvalidRequest
from twinstage.grammar.compile import Compilers
from twinstage.text.bundle import TokenizerBundle
from twinstage.types.constraints import Constraint, ConstraintForm, GrammarBackend

_FRAME = struct.Struct("<I")
_TRIED_TOKENS = 16  # as a grammar can be cheap to compile and dear to match
_STACK_BYTES = 4 * 1024 * 1024  # half of what workers have: what does not break here breaks nothing there


def main() -> None:
    """Compile what comes on standard input, until it ends; the verdicts go to standard output."""
    _limit_this_process()
    threading.stack_size(_STACK_BYTES)
    compilers: dict[str, Compilers] = {}
    while header := sys.stdin.buffer.read(_FRAME.size):
        (size,) = _FRAME.unpack(header)
        task = json.loads(sys.stdin.buffer.read(size))
        answer = json.dumps(_answer(task, compilers)).encode()
        sys.stdout.buffer.write(_FRAME.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


def _answer(task: dict[str, Any], known: dict[str, Compilers]) -> dict[str, str]:
    """What is wrong with the grammar of a task, or why the task's tokenizer is unusable; empty where nothing is."""
    if task["bundle"] is not None:
        try:  # outside the limits: this is no client's doing, and every grammar needs it
            compilers = Compilers(TokenizerBundle.from_bytes(task["bundle"].encode()))
            compilers.prepare(GrammarBackend(task["backend"]))
        except Exception as error:  # whatever a backend says of a tokenizer that it does not understand
            return {"wrong": "", "unusable": f"{error!r:.300}"}
        known[task["fingerprint"]] = compilers
    return {"wrong": _verdict(task, known[task["fingerprint"]]), "unusable": ""}


def _verdict(task: dict[str, Any], compilers: Compilers) -> str:
    constraint = Constraint(
        backend=GrammarBackend(task["backend"]),
        form=ConstraintForm(task["form"]),
        text=task["text"],
        choices=tuple(task["choices"]),
    )
    verdict: list[str] = []
    thread = threading.Thread(target=lambda: verdict.append(_try(constraint, compilers)))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + task["memory_bytes"], hard))
    signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])  # at its end comes SIGPROF, by which the end is recognized
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return verdict[0]


def _try(constraint: Constraint, compilers: Compilers) -> str:
    """Compile, and walk a few tokens."""
    try:
        matcher = compilers.compile(constraint)
        choose = random.Random(0)
        for _ in range(_TRIED_TOKENS):
            allowed = matcher.allowed().nonzero()[0]
            if not len(allowed) or not matcher.accept(int(choose.choice(allowed))):
                break
    except InvalidRequest as error:
        return error.violations[0].description
    except MemoryError:
        return "needs too much memory to compile"
    return ""


def _limit_this_process() -> None:
    """Limits that a compiler never needs to exceed."""
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (0, hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
