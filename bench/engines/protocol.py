"""The engine's side of the pipe. Standard library only: it also runs in the environments of peers."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]

_PR_SET_PDEATHSIG = 1  # prctl(2)


def serve(load: Callable[[], Mapping[str, Handler]]) -> None:
    """Load the engine, then answer commands until the input ends. What libraries print goes to standard error."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            handlers = load()
        except Exception as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})
            raise
        _answer(answers, {"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = handlers[request.pop("command")](**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            _answer(answers, answer)


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class Prompts:
    """Prompts of random tokens, none like another, so that no cache knows them. The same ones in every engine."""

    def __init__(self, vocabulary: int = 40_000) -> None:
        self._random = random.Random(20_240_229)
        self._vocabulary = vocabulary

    def next(self, length: int) -> list[int]:
        """`length` token ids; none of the special ones, which come first in the vocabulary of the demo model."""
        return [self._random.randrange(1_000, self._vocabulary) for _ in range(length)]
